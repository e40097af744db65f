"""The page of a comparison in a browser of a phone's width."""

from pathlib import Path
from typing import Any

import pytest

from mtrain.compare.page import page
from tests.comparing.jobs import Planted
from tests.comparing.test_report import comparison


@pytest.mark.job
def test_the_page_fits_the_width_of_a_phone(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "compare.html"
    file.write_text(page(comparison({"one": Planted(), "two": Planted(learning_rate_factor=2.0)})), encoding="utf-8")
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    browser.get(file.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= phone["width"]
    assert browser.find_elements("css selector", "svg .curve")
