"""The page in a real browser: an image is dropped on it, and what was found is drawn."""

import base64
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.serving.files import exported
from tests.serving.servers import Server, encoded, plain, serving, until

pytest.importorskip("onnx", reason="the extra export is not installed")
pytest.importorskip("selenium", reason="the extra dev is not installed")
pytestmark = [
    pytest.mark.job,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")), reason="chromium is not installed"
    ),
]
DROP = """
const [content, name, type] = arguments;
const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
const data = new DataTransfer();
data.items.add(new File([bytes], name, { type }));
for (const kind of ["dragenter", "dragover", "drop"]) {
  document.getElementById("drop").dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
}
"""


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(exported(tmp_path_factory.mktemp("page") / "colours.onnx", "detection")) as server:
        yield server


def dropped(browser: Any, content: bytes, name: str = "a.png", kind: str = "image/png") -> str:
    """Drop a file, and return what the page says when it has an answer."""
    before = text(browser, "status")
    browser.execute_script(DROP, base64.b64encode(content).decode(), name, kind)
    until(lambda: text(browser, "status") not in (before, "Looking ..."))
    return text(browser, "status")


def text(browser: Any, name: str) -> str:
    return str(browser.find_element("id", name).text)


def errors(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if "status of 4" not in entry["message"]]


def test_a_dropped_image_is_shown_with_its_boxes(browser, detector):
    browser.get(detector.url)
    until(lambda: text(browser, "model") == "colours.onnx")
    assert "detection of 3 classes" in text(browser, "about")
    assert dropped(browser, encoded(plain((255, 0, 0), width=400, height=200))) == "1 object: red."
    (box,) = browser.find_elements("css selector", "#boxes rect.box")
    size = [float(box.get_attribute(name)) for name in ("x", "y", "width", "height")]
    assert size == pytest.approx([100, 50, 200, 100], abs=2)
    image = browser.find_element("id", "image").rect
    drawn = box.rect
    assert drawn["x"] + drawn["width"] / 2 == pytest.approx(image["x"] + image["width"] / 2, abs=3)
    assert drawn["width"] == pytest.approx(image["width"] / 2, abs=8)
    assert browser.find_element("css selector", ".tag").text.startswith("red ")
    assert browser.find_element("id", "image").get_attribute("alt") == "1 object: red."
    assert len(browser.find_elements("css selector", "#rows tr")) == 1
    assert errors(browser) == []


def test_the_slider_chooses_by_keyboard(browser, detector):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.get(detector.url)
    assert "red" in dropped(browser, encoded(plain((255, 120, 60), width=64, height=64)))
    slider = browser.find_element("id", "confidence")
    slider.send_keys(Keys.HOME)
    assert len(browser.find_elements("css selector", "#rows tr")) == 3
    slider.send_keys(Keys.END)
    until(lambda: len(browser.find_elements("css selector", "#rows tr")) <= 1)
    browser.find_element("tag name", "body").click()
    reached = set()
    for _ in range(12):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        focused = browser.switch_to.active_element
        reached.add(focused.get_attribute("id") or focused.tag_name)
    assert {"file", "confidence", "a"} <= reached, "not everything can be reached by keyboard"


def test_a_file_that_is_no_image_gets_a_sentence(browser, detector):
    browser.get(detector.url)
    sentence = dropped(browser, b"no image", "notes.txt", "text/plain")
    assert sentence.startswith("notes.txt: is no image")
    assert not browser.find_element("id", "figure").is_displayed()
    assert "red" in dropped(browser, encoded(plain((255, 0, 0)))), "the page works on"
    assert browser.find_element("id", "figure").is_displayed()


def test_the_light_follows_the_system_and_everything_has_a_name(browser, detector):
    browser.get(detector.url)
    grounds = set()
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        grounds.add(browser.find_element("tag name", "body").value_of_css_property("background-color"))
    assert len(grounds) == 2
    dropped(browser, encoded(plain((255, 0, 0))))
    nodes = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    controls = [node for node in nodes if node["role"].get("value") in ("button", "link", "slider", "image", "table")]
    assert len(controls) >= 5
    assert [node for node in controls if not node["name"].get("value")] == []


@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_classes_and_masks_are_shown(browser, task, tmp_path: Path):
    image = np.concatenate([plain((0, 250, 0), width=60, height=80), plain((0, 0, 250), width=20, height=80)], axis=1)
    with serving(exported(tmp_path / "colours.onnx", task)) as server:
        browser.get(server.url)
        sentence = dropped(browser, encoded(image))
        if task == "classification":
            assert sentence == "green, 74%."
            return
        assert sentence == "green 75%, blue 25% of the image."
        colours = browser.execute_script(
            "const c = document.getElementById('mask');"
            "const at = (x, y) => [...c.getContext('2d').getImageData(x, y, 1, 1).data];"
            "return [c.width, c.height, at(10, 40), at(75, 40)];"
        )
        assert colours == [80, 80, [128, 0, 0, 255], [0, 128, 0, 255]], "Pascal VOC's colours of classes 1 and 2"
