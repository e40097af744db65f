"""The alert rules in docs/monitoring, checked by Prometheus' own tool."""

import shutil
import subprocess
from pathlib import Path

import pytest

SHIPPED = Path(__file__).parents[2] / "docs" / "monitoring"
PROMTOOL = shutil.which("promtool")
pytestmark = [pytest.mark.job, pytest.mark.skipif(PROMTOOL is None, reason="Prometheus is not installed")]


def promtool(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([str(PROMTOOL), *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The shipped files, and the examples that alerts are tested with."""
    for path in [*SHIPPED.glob("*.yml"), Path(__file__).with_name("alerts_test.yml")]:
        shutil.copy(path, tmp_path)
    return tmp_path


def test_prometheus_takes_the_rules_and_the_example_of_a_configuration(folder):
    assert promtool(folder, "check", "rules", "alerts.yml").returncode == 0
    assert promtool(folder, "check", "config", "prometheus.yml").returncode == 0


def test_every_alert_fires_on_what_it_is_about_and_on_nothing_else(folder):
    ended = promtool(folder, "test", "rules", "alerts_test.yml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    tested = (folder / "alerts_test.yml").read_text()
    alerts = [line.split()[-1] for line in (folder / "alerts.yml").read_text().splitlines() if "- alert:" in line]
    assert [name for name in alerts if f"alertname: {name}" not in tested] == []


def test_a_rule_that_looks_at_another_metric_is_noticed(folder):
    rules = folder / "alerts.yml"
    rules.write_text(rules.read_text().replace("mtrain_seconds_since_update", "mtrain_update_seconds"))
    assert promtool(folder, "test", "rules", "alerts_test.yml").returncode == 1
