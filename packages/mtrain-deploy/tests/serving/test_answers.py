"""What a server answers to good requests: real processes on the loopback interface."""

import base64
import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cv2
import httpx
import numpy as np
import pytest
from PIL import Image
from tests.serving.files import COLOURS, exported
from tests.serving.servers import ENVIRONMENT, Server, encoded, plain, serving, until

from mtrain.spec.resolved import Resolved
from tests.starts import starts_processes

pytest.importorskip("onnx", reason="the extra export is not installed")


@pytest.fixture(scope="module")
@starts_processes
def detector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(exported(tmp_path_factory.mktemp("detector") / "colours.onnx", "detection")) as server:
        yield server


def only(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    (image,) = response.json()["images"]
    return image


def test_a_box_is_in_pixels_of_the_image_as_displayed(detector):
    row = only(detector.predict(encoded(plain((255, 0, 0), width=128, height=64))))
    assert (row["width"], row["height"]) == (128, 64)
    (found,) = row["predictions"]
    assert (found["class"], found["label"], found["category_id"]) == ("red", 0, 1)
    assert found["bbox"] == pytest.approx([32, 16, 64, 32], abs=1)


def test_exif_orientation_turns_the_image_first(detector):
    image = Image.fromarray(plain((0, 255, 0), width=100, height=50))
    exif = Image.Exif()
    exif[0x0112] = 6
    for form in ("JPEG", "PNG", "WEBP"):
        content = io.BytesIO()
        image.save(content, form, exif=exif)
        row = only(detector.predict(content.getvalue(), f"image/{form.lower()}"))
        assert (row["width"], row["height"]) == (50, 100), form


def test_confidence_is_the_lowest_score(detector):
    content = encoded(plain((200, 80, 10)))
    scores = [found["score"] for found in only(detector.predict(content, confidence=0.0))["predictions"]]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 3
    for confidence, count in (
        (0.05, 3),
        (0.2, 2),
        (0.5, 1),
        (scores[1], 2),
        (math.nextafter(scores[1], 1), 1),
        (0.9, 0),
    ):
        assert len(only(detector.predict(content, confidence=confidence))["predictions"]) == count, confidence


def test_several_images_are_answered_in_their_order(detector):
    files = [("file", (f"{name}.png", encoded(plain(colour)))) for name, colour in COLOUR_VALUES.items()]
    answer = detector.client.post(f"{detector.url}/v1/predict", files=files).json()
    assert [(row["name"], row["predictions"][0]["class"]) for row in answer["images"]] == [
        (f"{name}.png", name) for name in COLOURS
    ]


COLOUR_VALUES = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}


@pytest.mark.job
def test_requests_at_once_get_their_own_answers_and_share_batches(tmp_path):
    wanted = [list(COLOURS)[number % 3] for number in range(36)]
    with (
        serving(exported(tmp_path / "slow.onnx", "detection", rounds=2), "--max-batch", "4") as server,
        ThreadPoolExecutor(12) as pool,
    ):
        images = {name: encoded(plain(colour)) for name, colour in COLOUR_VALUES.items()}
        rows = list(pool.map(lambda name: only(server.predict(images[name])), wanted))
        assert [row["predictions"][0]["class"] for row in rows] == wanted
        assert server.metric("mtrain_batch_size_sum") == 36
        assert server.metric("mtrain_batch_size_count") < 30, "batches were not shared"
        assert server.metric("mtrain_images_total") == 36
        assert server.metric("mtrain_images_in_work") == 0
        assert server.metric("mtrain_received_bytes") == 0


@pytest.mark.job
def test_a_file_with_a_fixed_batch_computes_any_number(tmp_path):
    with serving(exported(tmp_path / "fixed.onnx", "detection", batch=2)) as server:
        files = [("file", ("a.png", encoded(plain(COLOUR_VALUES[name])))) for name in ("red", "green", "blue")]
        answer = server.client.post(f"{server.url}/v1/predict", files=files).json()
        assert [row["predictions"][0]["class"] for row in answer["images"]] == ["red", "green", "blue"]
        assert server.client.get(f"{server.url}/v1/model").json()["limits"]["batch"] == 2


def test_a_drawing_has_the_form_that_the_client_accepts(detector):
    content = encoded(plain((255, 0, 0), width=200, height=100))
    for accepted, kind in (("image/png", "PNG"), ("*/*", "JPEG"), ("image/webp,image/png,image/jpeg", "JPEG")):
        answer = detector.client.post(
            f"{detector.url}/v1/predict?draw=true", content=content, headers={"accept": accepted}
        )
        drawing = Image.open(io.BytesIO(answer.content))
        assert (answer.status_code, drawing.format, drawing.size) == (200, kind, (200, 100))
        assert answer.headers["content-type"] == f"image/{kind.lower()}"
        assert np.asarray(drawing).std() > 5, "nothing was drawn"


@pytest.mark.job
def test_classes_are_answered_best_first(tmp_path):
    with serving(exported(tmp_path / "classes.onnx", "classification")) as server:
        row = only(server.predict(encoded(plain((30, 220, 120), width=64, height=64)), confidence=0.4))
        assert [found["class"] for found in row["predictions"]] == ["green", "blue"]
        assert row["predictions"][0]["score"] == pytest.approx(220 / 255, abs=0.01)
        drawing = server.predict(encoded(plain((30, 220, 120), width=64, height=64)), draw=True)
        assert (drawing.status_code, drawing.headers["content-type"]) == (200, "image/jpeg")


@pytest.mark.job
def test_masks_have_the_size_of_the_image(tmp_path):
    image = np.concatenate([plain((0, 250, 0), width=60, height=40), plain((0, 0, 250), width=20, height=40)], axis=1)
    with serving(exported(tmp_path / "masks.onnx", "segmentation")) as server:
        row = only(server.predict(encoded(image)))
        shares = {found["class"]: found["share"] for found in row["predictions"]}
        assert shares["green"] == pytest.approx(0.75, abs=0.03)
        assert shares["blue"] == pytest.approx(0.25, abs=0.03)
        mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(row["mask"]))))
        assert mask.shape == (40, 80)
        assert (mask[20, 10], mask[20, 75]) == (1, 2)
        drawn = cv2.imdecode(np.frombuffer(server.predict(encoded(image), draw=True).content, np.uint8), 1)
        assert drawn.shape == (40, 80, 3)


@pytest.mark.job
@pytest.mark.parametrize("task", ["detection", "classification", "segmentation"])
def test_samples_equal_those_of_a_prediction_on_files(task, tmp_path):
    """A server must not see other pixels than `mtrain predict` does."""
    from mtrain.data.images.decode import decode
    from mtrain_deploy.exported.data import image_data, micro_batches
    from mtrain_deploy.serving.predictor import Predictor

    rng = np.random.default_rng(0)
    sizes = [(97, 41), (20, 300), (64, 64), (1, 1), (900, 1), (640, 480)]
    files = []
    for number, (width, height) in enumerate(sizes):
        files.append(tmp_path / f"{number}.png")
        cv2.imwrite(str(files[-1]), rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    predictor = Predictor.open(exported(tmp_path / "colours.onnx", task), threads=1)
    model = predictor._model
    data = image_data(Resolved.of(model.spec()), model.metadata, files)
    for file, batch in zip(files, micro_batches(data, size=1), strict=True):
        sample = predictor.sample(decode(file))
        for name, array in sample.arrays.items():
            assert np.array_equal(batch[name][0][..., : array.shape[-1]], array), (file.name, name)


def test_information_about_server_and_model(detector):
    until(lambda: detector.client.get(f"{detector.url}/readyz").status_code == 200)
    assert detector.client.get(f"{detector.url}/healthz").json() == {"status": "live"}
    model = detector.client.get(f"{detector.url}/v1/model").json()
    assert (model["task"], model["model"], model["class_names"]) == ("detection", "yolov5n", list(COLOURS))
    assert model["file"] == "colours.onnx"
    assert "spec" not in model
    assert "/" not in json.dumps({key: model[key] for key in model if key != "mtrain"}), "no path leaves the server"
    assert "/v1/predict" in detector.client.get(f"{detector.url}/openapi.json").json()["paths"]
    page = detector.client.get(detector.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http" not in page.text.replace("http://www.w3.org/2000/svg", ""), "the page loads nothing from elsewhere"


@pytest.mark.job
def test_the_asgi_application_needs_no_process_of_ours(tmp_path):
    """uvicorn and gunicorn take an object of a module: `mtrain_deploy.serving.app`."""
    exported(tmp_path / "colours.onnx", "classification")
    code = (
        "import asyncio, httpx, mtrain_deploy.serving\n"
        "app = mtrain_deploy.serving.app('colours.onnx', threads=1)\n"
        "async def main():\n"
        "    async with app.router.lifespan_context(app):\n"
        "        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url='http://x') as client:\n"
        "            answer = await client.post('/v1/predict', content=open('a.png', 'rb').read())\n"
        "            print(answer.json()['images'][0]['predictions'][0]['class'])\n"
        "asyncio.run(main())\n"
        "import sys; assert not {'torch', 'paddle'} & set(sys.modules)\n"
    )
    (tmp_path / "a.png").write_bytes(encoded(plain((0, 0, 255))))
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, timeout=60
    )
    assert process.stdout.strip() == "blue", process.stderr
