"""Other projects' own tests, run under mtrain and beside their own launcher, as a table in docs/referees.md.

usage: python -m tests.referees [--no-page] [NAME ...]      names of referees; without any, all that are here

Nothing of theirs is in this tree: tests that come in an installed package are run there, others from checkouts below the
folder that the variable REFEREES names (`horovod`, ...). A case that fails under mtrain alone ends the command with 1.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from tests.referees.cases import CHECKOUTS, REFEREES, Referee, Script, Suite

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "referees.md"
RESULTS = ROOT / ".referees.json"  # of all that were run, so that one referee can be run anew
BEGIN, END = "<!-- written by make referees -->", "<!-- end of what make referees writes -->"
SILENCE_S = 300  # without a test that ends, the job hangs
OUTCOMES = ("passed", "skipped", "failed", "hung")


def main(names: list[str]) -> int:
    """Run the referees, write the page unless ``--no-page`` is given; 1 where a case fails under mtrain alone."""
    writes_page, names = "--no-page" not in names, [name for name in names if name != "--no-page"]
    if unknown := set(names) - {referee.name for referee in REFEREES}:
        print(
            f"{', '.join(sorted(unknown))}: expected {', '.join(referee.name for referee in REFEREES)}", file=sys.stderr
        )
        return 2
    for referee in REFEREES:
        if names and referee.name not in names:
            continue
        if (missing := referee.missing()) is not None:
            print(f"{referee.name}: not run: {missing}", flush=True)
            continue
        start = time.monotonic()
        cases = (
            run_suite(referee, referee.work) if isinstance(referee.work, Suite) else run_scripts(referee, referee.work)
        )
        result = {"version": referee.version(), "seconds": round(time.monotonic() - start), "cases": cases}
        # Read again: another may have been judged meanwhile.
        RESULTS.write_text(json.dumps({**results(), referee.name: result}, indent=1), encoding="utf-8")
    known = results()
    if writes_page:
        write(known)
    wanting = [
        (name, case) for name, its in known.items() for case, told in its["cases"].items() if told["reason"] == "mend"
    ]
    for name, case in wanting:
        print(f"{name}: {case}: fails under mtrain alone", file=sys.stderr)
    return int(bool(wanting))


def results() -> dict[str, dict]:  # type: ignore[type-arg]
    """What is known of each referee."""
    known: dict[str, dict] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}  # type: ignore[type-arg]
    return known


def run_scripts(referee: Referee, scripts: tuple[Script, ...]) -> dict[str, dict[str, str]]:
    """Each script under its own launcher and under mtrain."""
    cases = {}
    for script in scripts:
        told = {
            side: run_script(referee, script, words)
            for side, words in (("theirs", script.theirs), ("ours", script.ours))
        }
        if told["theirs"][0] == told["ours"][0] == "passed" and told["theirs"] != told["ours"]:
            told["ours"] = ("failed", f"{script.result}: {told['ours'][1]}, not {told['theirs'][1]}")
        cases[script.name] = judge(*told["theirs"], *told["ours"])
        print(f"{referee.name}: {script.name}: {cases[script.name]}", flush=True)
    return cases


def run_script(referee: Referee, script: Script, launcher: tuple[str, ...]) -> tuple[str, str]:
    """The outcome of a script, and its last line where it failed."""
    if not launcher:
        return "-", ""
    with tempfile.TemporaryDirectory(prefix="referee-") as folder:
        code, output = run([*launcher, script.file(), *script.words], Path(folder), referee.environ)
        if code == 0:
            return "passed", Path(folder, script.result).read_text(encoding="utf-8") if script.result else ""
    return ("hung", "") if code is None else ("failed", last_error(output))


def run_suite(referee: Referee, suite: Suite) -> dict[str, dict[str, str]]:
    """Each test of a suite, one job after another until none is left, under both launchers."""
    names = suite.names()
    sides = {
        side: run_tests(referee, suite, names, words)
        for side, words in (("theirs", suite.theirs), ("ours", suite.ours))
    }
    return {name: judge(*sides["theirs"][name], *sides["ours"][name]) for name in names}


def run_tests(
    referee: Referee, suite: Suite, names: list[str], launcher: tuple[str, ...]
) -> dict[str, tuple[str, str]]:
    """The outcome of each test: the worst of what its ranks tell."""
    if not launcher:
        return dict.fromkeys(names, ("-", ""))
    outcomes: dict[str, tuple[str, str]] = {}
    while left := [name for name in names if name not in outcomes]:
        with tempfile.TemporaryDirectory(prefix="referee-") as folder:
            Path(folder, "names.txt").write_text("\n".join(left), encoding="utf-8")
            argv = [*launcher, str(Path(__file__).with_name("on_ranks.py")), suite.loader(), folder]
            code, output = run(argv, Path(folder), referee.environ)
            told = [
                line.split(" ", 2) for path in Path(folder).glob("rank-*.txt") for line in path.read_text().splitlines()
            ]
        for name in left:
            of_ranks = [line for line in told if line[0] == name]
            ended = [(line[1], line[2] if len(line) > 2 else "") for line in of_ranks if line[1] != "begun"]
            if len(ended) == suite.ranks or any(outcome == "failed" for outcome, _ in ended):
                outcomes[name] = max(ended, key=lambda each: OUTCOMES.index(each[0]))
            elif of_ranks:  # a rank has begun it and not ended it
                outcomes[name] = ("hung", "") if code is None else ("failed", last_error(output))
            if outcomes.get(name, ("",))[0] in ("failed", "hung"):
                break  # A rank that was further on has begun tests that it could not end; they get a job of their own.
        if not told:  # The job itself did not start: no test can be blamed.
            outcomes |= {name: ("failed", last_error(output)) for name in left}
        print(f"{referee.name}: {len(outcomes)} of {len(names)} under {Path(launcher[0]).name}", flush=True)
    return outcomes


def run(argv: list[str], folder: Path, environ: dict[str, str]) -> tuple[int | None, str]:
    """The exit code of a command and what it printed; None where it was silent for long, and was ended."""
    output = folder / "output.txt"
    with output.open("w") as file:
        settings = {**os.environ, "OMP_NUM_THREADS": "1", "REFEREES": str(CHECKOUTS), **environ}
        job = subprocess.Popen(
            argv, cwd=folder, env=settings, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        told, since = 0, time.monotonic()
        while job.poll() is None:
            time.sleep(0.2)
            now = sum(path.stat().st_size for path in folder.glob("*.txt"))
            if now != told:
                told, since = now, time.monotonic()
            if time.monotonic() - since > SILENCE_S:
                end(job)
                return None, output.read_text(errors="replace")
    return job.returncode, output.read_text(errors="replace")


def end(job: subprocess.Popen[bytes]) -> None:
    """End a command with the processes of its session."""
    with suppress(subprocess.TimeoutExpired):
        os.killpg(job.pid, signal.SIGTERM)
        job.wait(30)
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()


def last_error(output: str) -> str:
    """The last line that names an error."""
    lines = [line.strip() for line in output.splitlines() if "Error" in line or line.startswith("error:")]
    return lines[-1][:200] if lines else "no line with an error"


def judge(theirs: str, their_why: str, ours: str, our_why: str) -> dict[str, str]:
    """A row of the table: both outcomes, and what follows where ours is no pass."""
    row = {"theirs": theirs, "ours": ours, "why": our_why or their_why, "reason": ""}
    if ours in ("failed", "hung"):
        row["reason"] = "fails there too" if theirs in ("failed", "hung") else "mend"
    return row


def write(known: dict[str, dict]) -> None:  # type: ignore[type-arg]
    """Write the table of referees, and that of the cases that do not pass, in place of those of the last run."""
    lines = [
        f"{time.strftime('%Y-%m-%d')}:",
        "",
        "| referee | cases | passed there | passed here | skipped by them | minutes |",
        "|---" * 6 + "|",
    ]
    for name, its in known.items():
        rows = list(its["cases"].values())
        passed = [
            "-" if all(row[side] == "-" for row in rows) else sum(row[side] == "passed" for row in rows)
            for side in ("theirs", "ours")
        ]
        skipped = sum(row["ours"] == "skipped" for row in rows)
        lines.append(
            f"| {name} {its['version']} | {len(rows)} | {passed[0]} | {passed[1]} | {skipped} | {its['seconds'] / 60:.1f} |"
        )
    lines += ["", "| referee | case | theirs | ours | reason | what is said |", "|---" * 6 + "|"]
    for name, its in known.items():
        for case, row in its["cases"].items():
            if row["ours"] in ("failed", "hung") or row["theirs"] in ("failed", "hung"):
                said = row["why"].replace("|", "/")[:110]
                lines.append(f"| {name} | {case} | {row['theirs']} | {row['ours']} | {row['reason']} | {said} |")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
