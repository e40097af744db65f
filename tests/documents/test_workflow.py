"""What a forge runs for a change is what a developer runs: `.ci/run`, and `.github/workflows/checks.yml` job by job."""

import re
from typing import Any

import yaml

from scripts.site.documents import ROOT

WORKFLOW: dict[Any, Any] = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text(encoding="utf-8"))


def test_the_workflow_runs_the_commands_of_ci_run() -> None:
    wanted = re.findall(r"^make .+$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    steps = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if step.get("run", "").startswith("make ")] == wanted
    assert wanted == ["make check", "make test", "make test-environments", "make instructions"]


def test_the_workflow_may_only_read_and_runs_for_main_and_requests() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    events = WORKFLOW[True]  # YAML 1.1 reads `on` as a truth value
    assert set(events) == {"push", "pull_request"}
    assert events["push"] == {"branches": ["main"]}


def test_tests_run_as_root_on_debian_because_packages_and_hosts_need_it() -> None:
    container = WORKFLOW["jobs"]["test"]["container"]
    assert container["image"].endswith("-bookworm")
    assert "--privileged" in container["options"]


def test_commands_that_the_templates_ask_for_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / ".github").rglob("*") if path.is_file()]
    asked = {name for text in texts for name in re.findall(r"\bmake ([a-z-]+)", text)}
    assert {"check", "test", "fingerprints"} <= asked <= targets
