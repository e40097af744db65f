"""A real Prometheus reads three hosts that train, and its alert fires when a rank hangs."""

import json
import re
import shutil
from collections.abc import Iterator

import pytest

from tests.cluster.jobs import ENDLESS, HOSTS, Jobs
from tests.cluster.lab import ROOT, Lab, address, wait_for

PORT = 9400
WATCHER = "node4"
SHIPPED = ROOT / "docs" / "monitoring"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
]


class Prometheus:
    """Prometheus on a host that is in no job; it answers there alone."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def query(self, expression: str) -> dict[str, float]:
        """Return the values of an expression, by their labels without name and job; none while nothing answers."""
        process = self._lab.start(
            WATCHER, ["promtool", "query", "instant", "-o", "json", "http://127.0.0.1:9090", expression]
        )
        output, _ = process.communicate(timeout=60)
        found = {}
        for each in json.loads(output) if process.returncode == 0 else ():
            labels = {name: word for name, word in each["metric"].items() if name not in ("__name__", "job", "run")}
            found[" ".join(labels.values())] = float(each["value"][1])
        return found

    def firing(self, run: str) -> set[str]:
        """Return the names of the alerts that fire about a run."""
        return set(self.query(f'sum by (alertname) (ALERTS{{alertstate="firing", run="{run}"}})'))


@pytest.fixture
def prometheus(lab: Lab) -> Iterator[Prometheus]:
    """Prometheus with the shipped rules, which are quick here: seconds in place of minutes."""
    folder = lab.share / "prometheus"
    folder.mkdir()
    rules = (SHIPPED / "alerts.yml").read_text()
    (folder / "alerts.yml").write_text(rules.replace("> 600", "> 6").replace("for: 1m", "for: 1s"))
    config = (SHIPPED / "prometheus.yml").read_text().replace("15s", "1s")
    for number in range(1, HOSTS + 1):
        config = config.replace(f"10.0.0.{number}:", f"{address(f'node{number}')}:")
    (folder / "prometheus.yml").write_text(config)
    words = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = lab.start(WATCHER, [*words, "--web.listen-address=127.0.0.1:9090"])
    made = Prometheus(lab)
    yield made
    for each in lab.processes(WATCHER):
        if each.words[0] == "prometheus":
            lab.kill(each, "TERM")
    process.communicate(timeout=60)
    shutil.rmtree(folder)


def panels() -> list[str]:
    """Expressions of the dashboard, for all runs."""
    targets = [
        target
        for panel in json.loads((SHIPPED / "dashboard.json").read_text())["panels"]
        for target in panel["targets"]
    ]
    return [target["expr"].replace("$run", ".*") for target in targets]


def test_prometheus_reads_three_hosts_and_its_alert_fires_when_a_rank_hangs(
    jobs: Jobs, lab: Lab, prometheus: Prometheus
):
    job = jobs.over_ssh(
        "watched",
        train__updates=ENDLESS,
        evaluate__every_updates=4,
        report__metrics_port=PORT,
        report__metrics_address="host",
    )
    job.reach(8)
    wait_for(lambda: len(prometheus.query("mtrain_update > 6")) == HOSTS, what="that Prometheus has seen all hosts")
    hosts = [f"{address(f'node{number}')}:{PORT}" for number in (1, 2, 3)]
    assert prometheus.query("mtrain_hosts") == dict.fromkeys(hosts, 3.0)
    assert prometheus.query("mtrain_restarts_total") == dict.fromkeys(hosts, 0.0)
    assert sorted(prometheus.query("mtrain_memory_bytes > 1e7")) == [
        f"{host} {rank}" for rank, host in enumerate(hosts)
    ]
    assert {re.sub(r"\s+", " ", each): prometheus.query(each) for each in panels() if not prometheus.query(each)} == {}
    assert prometheus.firing(job.name) == set()
    rank = lab.rank_on("node2")
    lab.kill(rank, "STOP")
    wait_for(lambda: prometheus.firing(job.name) == {"MtrainStuck"}, what="that the alert fires")
    lab.kill(rank, "CONT")
    wait_for(lambda: prometheus.firing(job.name) == set(), what="that the alert ends")
    lab.kill(job.starter("node1"), "TERM")
    assert job.finish().code == 143
    wait_for(lambda: set(prometheus.query("up").values()) == {0.0}, what="that the ports are closed")
