"""`mtrain ui` in a browser, beside a job that really trains."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from tests.pages.folders import end, evaluation, records, start, update, write_run

from mtrain_ui.pages.report import write

ATTACK = (
    "<script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'><svg onload='window.attacked = 3'>"
)
HOSTILE = '"><img src=x onerror="window.attacked=4">'
"""A name that a folder can have: without a slash."""


def wait(condition, *, seconds: float = 60.0):
    """Return the first true value of a condition."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.2)
    return value


def texts(browser, selector: str) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].filter(e => !e.closest('[hidden]')).map(e => e.textContent.trim())",
        selector,
    )


@pytest.fixture(scope="module")
def filled(runs):
    write_run(
        runs / "older", records(60, score=0.4), spec={"train": {"epochs": 1, "seed": 0}, "model": {"name": "vit"}}
    )
    newer = [start(time=1.8e9, model="resnet18"), *records(30, score=0.9, reason="failed")[1:]]
    write_run(runs / "newer", newer, spec={"train": {"epochs": 2, "seed": 0}, "model": {"name": "vit"}})
    hostile = [start(time=1.6e9, model=ATTACK, device=ATTACK), update(0, unit=ATTACK, losses={ATTACK: 1.0})]
    metrics = {"score": 1.0, ATTACK: 0.5, f"accuracy/{ATTACK}": 0.5}
    hostile += [evaluation(1, 1.0, metrics=metrics, headline=[ATTACK]), {"kind": "warning", "message": ATTACK}]
    run = write_run(
        runs / HOSTILE, hostile, spec={"train": {ATTACK: ATTACK}}, environment={"argv": [ATTACK], "host": ATTACK}
    )
    (run / "spec.yml").write_text(ATTACK)
    (run / "logs" / f"{HOSTILE}.log").write_text(ATTACK)
    (run / "logs/rank-0.log").write_text(ATTACK)
    return runs


def errors_of(browser) -> list[str]:
    """Messages of the browser's console, such as those of a policy that was broken."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_the_list_shows_sorts_and_filters_runs(browser, address, filled):
    from selenium.webdriver.support.ui import Select

    browser.get(address)
    names = "#runs tbody tr td:nth-child(2)"
    assert texts(browser, names)[:2] == ["newer", "older"]
    assert texts(browser, "#runs tbody .state")[:2] == ["failed", "finished"]
    best = browser.find_element("css selector", "#runs th:nth-child(8)")
    best.click()
    assert texts(browser, "#runs tbody td:nth-child(8)")[:3] == ["0.9000", "0.5000", "0.4000"]
    best.click()
    assert texts(browser, "#runs tbody td:nth-child(8)")[:2] == ["0.4000", "0.5000"]
    browser.find_element("id", "filter").send_keys("resnet")
    assert texts(browser, names) == ["newer"]
    Select(browser.find_element("id", "state")).select_by_visible_text("finished")
    assert texts(browser, names) == [], "both conditions count"
    assert errors_of(browser) == []


@pytest.mark.parametrize("path", ["/", "/run/older", "/report/older", "/compare?run=older&run=newer"])
def test_pages_fit_the_width_of_a_phone(browser, address, filled, path):
    phone = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        browser.get(address + path)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= phone["width"]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_two_chosen_runs_are_compared(browser, address, filled):
    browser.get(address)
    assert not browser.find_element("id", "compare").is_enabled()
    for name in ("older", "newer"):
        browser.find_element("css selector", f"input[value={name}]").click()
    browser.find_element("id", "compare").click()
    wait(lambda: "/compare?" in browser.current_url)
    assert set(texts(browser, ".legend a")) == {"older", "newer"}
    assert len(browser.find_elements("css selector", "figure:first-child .curve:not(.faint)")) == 2
    rows = texts(browser, "table tbody tr")
    assert [row for row in rows if row.startswith("train.epochs")], rows
    assert not [row for row in rows if row.startswith("train.seed")]
    assert [row for row in rows if row.startswith("accuracy") and "0.4" in row and "0.9" in row]
    assert errors_of(browser) == []


@pytest.mark.parametrize("kind", ["list", "run", "report", "compare", "file"])
def test_names_of_strangers_run_no_script(browser, address, filled, kind, tmp_path):
    from urllib.parse import quote

    name = quote(HOSTILE)
    paths = {
        "list": "/",
        "run": f"/run/{name}",
        "report": f"/report/{name}",
        "compare": f"/compare?run={name}&run=older",
    }
    file = write(filled / HOSTILE, tmp_path / "report.html") if kind == "file" else None
    browser.get(f"file://{file}" if file else address + paths[kind])
    seen = browser.find_element("tag name", "body").text
    assert "window.attacked" in seen, "the text is there, as text"
    if kind == "run":
        wait(lambda: "window.attacked = 1" in browser.find_element("id", "lines").text)
    time.sleep(0.3)
    assert browser.execute_script("return window.attacked === undefined")
    assert browser.find_elements("css selector", "main img[src='x'], main script, main svg[onload]") == []
    assert errors_of(browser) == []


UPDATES = "return parseInt([...document.querySelectorAll('.tile')].find(e => e.textContent.endsWith('updates'))?.textContent) || 0"
CURVE = "return (document.querySelector('#curves figure .curve') || document.head).outerHTML"


def test_curves_and_logs_grow_while_a_run_goes_on(browser, address, runs):
    run = write_run(runs / "growing", [start(time=1.6e9), *(update(i) for i in range(3))])
    (run / ".lock-0").write_text(str(os.getpid()))
    browser.get(f"{address}/run/growing")
    assert browser.execute_script(UPDATES) == 3
    curve = browser.execute_script(CURVE)
    wait(lambda: "second line" in browser.find_element("id", "lines").text)
    with (run / "metrics.jsonl").open("a") as file, (run / "logs/rank-0.log").open("a") as log:
        file.writelines(json.dumps(update(i)) + "\n" for i in range(3, 8))
        log.write("a later line\n")
    wait(lambda: browser.execute_script(UPDATES) == 8)
    assert browser.execute_script(CURVE) != curve
    wait(lambda: "a later line" in browser.find_element("id", "lines").text)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(end()) + "\n")
    wait(lambda: texts(browser, "#live > p .state") == ["finished"])
    assert errors_of(browser) == []


@pytest.mark.slow
def test_the_curves_of_a_running_job_grow_and_its_end_is_shown(browser, address, runs):
    values = [
        "train.epochs=null",
        "train.updates=100000",
        "evaluate.enabled=false",
        "cluster.threads=1",
        f"report.dir={runs}",
    ]
    values += ["report.tensorboard=false", "report.plots=false", "checkpoint.every_epochs=null"]
    command = [
        sys.executable,
        "-m",
        "mtrain",
        "train",
        "-c",
        "vit_digits",
        "--backend",
        "solo",
        "--name",
        "live",
        "-o",
        *values,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as job:
        try:
            wait(lambda: (runs / "live/spec.json").exists(), seconds=120)
            browser.get(f"{address}/run/live")
            assert texts(browser, "#live > p .state") == ["running"]
            first = wait(lambda: browser.execute_script(UPDATES), seconds=120)
            curve = browser.execute_script(CURVE)
            assert wait(lambda: browser.execute_script(UPDATES) > first)
            assert browser.execute_script(CURVE) != curve
        finally:
            job.send_signal(signal.SIGTERM)
            code = job.wait(timeout=120)
    assert code == 143
    wait(lambda: texts(browser, "#live > p .state") == ["interrupted"])
    assert not (runs / "live/report.html").exists()
    ends = [json.loads(line) for line in (runs / "live/metrics.jsonl").read_text().splitlines() if '"end"' in line]
    assert ends[-1]["reason"] == "interrupted"
    assert errors_of(browser) == []
