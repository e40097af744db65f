"""``mtrain doctor``: check this host, the hosts of a job, and every installed backend, before a job is started."""

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mtrain.cli.options import JobCommand, host_options, load_job

if TYPE_CHECKING:
    from mtrain.cluster.many_hosts import Brief
    from mtrain.cluster.preflight.findings import Finding
    from mtrain.spec.config import Loaded
    from mtrain.spec.plugins import Entry

RANKS = 2
"""Ranks of an all-reduce on this host, unless it has fewer GPUs or --nproc-per-node is given."""
PLAIN = "digits"
"""The spec for the all-reduce of each backend other than the one that the given spec selects."""
FOLDER = Path("~/.cache/mtrain/doctor")
"""Where all-reduces run, on every host; the folders of failed ones are kept."""
INTERRUPTED = 128
"""Exit codes above this one mean that a signal ended the job."""


@click.command("doctor", cls=JobCommand)
@host_options
@click.option("--quick", is_flag=True, help="Leave out the all-reduce of each backend.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--build-horovod", is_flag=True, help="Build Horovod for this interpreter's torch and install it; checks nothing."
)
@click.pass_context
def doctor(context: click.Context, /, **params: Any) -> None:
    """Check this host and the hosts of --ips, and let each installed backend (or that of -b) add up numbers over its ranks.

    Without --cluster ssh the same command is started on each of several hosts. Exit code: 0, nothing is in the way of
    a job; 1, something is; 2, wrong use.
    """
    context.exit(build_horovod() if params["build_horovod"] else Doctor(params).run())


def build_horovod() -> int:
    """Run the build script of mtrain for the interpreter that runs mtrain; return the script's exit code."""
    import subprocess

    import mtrain

    script = Path(mtrain.__file__).parent / "backends" / "_horovod" / "build.sh"
    return subprocess.run(["bash", str(script), sys.executable], check=False).returncode  # noqa: S603, S607 - ours


class Doctor:
    """One run of ``mtrain doctor``."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        """``params``: the parameters of the command."""
        from mtrain.cluster import many_hosts

        self._params = params
        self._loaded = load_job(params)
        cluster = self._loaded.spec.cluster
        if many_hosts.is_several(self._loaded) and not cluster.ips:
            raise click.UsageError(
                f"cluster.name {cluster.name}: no host is named; give them with --ips A,B or --hostfile"
            )
        self._hosts = cluster.ips if many_hosts.is_several(self._loaded) else []
        self._findings: list[Finding] = []
        self._stream = sys.stdout

    def run(self) -> int:
        """Run all checks; return the exit code."""
        self._check_this_host()
        code = self._check_hosts() if self._hosts else 0
        if code == 0 and not self._params["quick"]:
            for entry in self._entries():
                code = self._run_all_reduce(entry)
                if code > INTERRUPTED:
                    break
        return code if code > INTERRUPTED else self._close(code)

    def _report(self, findings: Sequence["Finding"], *, every: str = "here") -> None:
        """Show findings at once, unless ``--json`` asks for one document at the end."""
        from mtrain.cluster.preflight.findings import show

        self._findings += findings
        if not self._params["as_json"]:
            show(findings, every=every, stream=self._stream)

    def _report_on_hosts(self, findings: Sequence["Finding"]) -> None:
        self._report(findings, every=f"all {len(self._hosts)} hosts")

    def _close(self, code: int) -> int:
        from mtrain import __version__
        from mtrain.cluster.preflight.findings import bad, worst

        state = worst(self._findings)
        if self._params["as_json"]:
            rows = [finding.as_json() for finding in self._findings]
            click.echo(json.dumps({"mtrain": __version__, "state": state, "findings": rows}, indent=2))
        elif state == "bad":
            count = len(bad(self._findings))
            click.echo(f"{count} finding{'s are' if count > 1 else ' is'} in the way of a job")
        return 1 if state == "bad" or code else 0

    # ------------------------------------------------------------------------------------------------------- this host
    def _check_this_host(self) -> None:
        """Check this machine, its libraries, and whether it fits the spec."""
        from mtrain.cluster.preflight.findings import Finding
        from mtrain.cluster.preflight.libraries import libraries, this_host
        from mtrain.spec import config
        from mtrain.system import environment

        spec, environ = self._loaded.spec, environment.caller()
        self._report(this_host(environ))
        python = spec.backend.python or sys.executable
        cleaned = environment.cleaned(environ)
        self._report(libraries(self._backends(), chosen=self._requested_backend(), python=python, environ=cleaned))
        if self._params["config"] is None and Path(config.HERE).is_file():
            text = f"{self._loaded.source} says which hosts, ranks and backend; -c {config.HERE} looks at all of it"
            self._report([Finding(check="spec", state="ok", text=text)])
        elif self._params["config"] is not None and not self._hosts:
            self._report(self._spec())

    def _requested_backend(self) -> str | None:
        """Return the backend that the user has chosen with ``-b`` or a spec; None: no choice was made."""
        is_chosen = self._params["config"] is not None or self._params["backend"] is not None
        return self._loaded.spec.backend.name if is_chosen else None

    def _backends(self) -> list["Entry"]:
        """Return all enabled backends, or the one of ``-b``."""
        from mtrain.spec import plugins

        entries = plugins.names("backends", policy=self._loaded.policy)
        return [entry for entry in entries if entry.enabled and self._params["backend"] in (None, entry.name)]

    def _spec(self) -> list["Finding"]:
        """Return what keeps the spec from training here, in the words of ``mtrain train``."""
        from mtrain.cluster import start
        from mtrain.cluster.preflight.findings import Finding
        from mtrain.errors import UsageError
        from mtrain.jobs import preflight

        try:
            plan = start.planned(self._loaded, start.locate(self._loaded, resume=None))
            notes = preflight.check(self._loaded.spec, size=plan.size)
        except UsageError as error:
            return [Finding(check="spec", state="bad", text=line) for line in str(error).splitlines()]
        text = f"{self._loaded.source}: data, model and {plan.size} rank{'s' if plan.size > 1 else ''} fit together"
        fits = Finding(check="spec", state="ok", text=text)
        return [fits, *(Finding(check="data", state="warning", text=note) for note in notes)]

    # ------------------------------------------------------------------------------------------------------- all hosts
    def _check_hosts(self) -> int:
        """Run the preflight of all hosts.

        Returns the exit code, on a host that serves another one the code of that one.
        """
        from mtrain.cluster import many_hosts
        from mtrain.cluster.leader import PREFLIGHT_ONLY
        from mtrain.cluster.preflight.findings import worst
        from mtrain.errors import UsageError

        loaded = self._loaded if self._params["config"] is not None else self._job(self._loaded.spec.backend.name)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # notes, such as which host is waited for
                result = many_hosts.run(self._brief(loaded, PREFLIGHT_ONLY, "preflight"), tell=self._report_on_hosts)
        except UsageError:
            if worst(self._findings) != "bad":
                raise
            return 1
        return result.code

    def _brief(self, loaded: "Loaded", mode: str, name: str) -> "Brief":
        from mtrain.cluster import many_hosts, start

        by_hand = many_hosts.is_by_hand(loaded)
        machine = start.here(loaded)
        return many_hosts.Brief(loaded=loaded, mode=mode, name=name, machine=machine, by_hand=by_hand, latest=False)

    # ------------------------------------------------------------------------------------------------------ all-reduces
    def _entries(self) -> Iterator["Entry"]:
        """Yield the backends that can be started here."""
        own = self._loaded.spec.backend
        for entry in self._backends():
            here = entry.installed or (entry.name == own.name and own.python is not None)
            if here and not entry.rivals and (not self._hosts or self._rendezvous(entry.name) != "none"):
                yield entry

    def _rendezvous(self, backend: str) -> str:
        from mtrain.spec import plugins

        return str(plugins.load("backends", backend, policy=self._loaded.policy).rendezvous)

    def _run_all_reduce(self, entry: "Entry") -> int:
        """Run an all-reduce over the ranks of one backend, and report the result; return the exit code of the job."""
        from mtrain.cluster.preflight.findings import Finding
        from mtrain.errors import MtrainError

        report = self._report_on_hosts if self._hosts else self._report
        summary: Mapping[str, Any] = {}
        with _captured_output() as output:
            try:
                code, summary = self._start(self._job(entry.name), entry.name)
            except MtrainError as error:
                code = error.exit_code
                output.write(f"error: {error}")
        if code:
            lines = [line.strip() for line in output.getvalue().splitlines() if line.strip()]
            last = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
            report([Finding(check="all-reduce", state="bad", text=f"{entry.name}: {last}", remedy=f"see {FOLDER}")])
        elif summary:
            report([Finding(check="all-reduce", state="ok", text=f"{entry.name}: {_in_words(summary)}")])
        return code

    def _start(self, loaded: "Loaded", name: str) -> tuple[int, Mapping[str, Any]]:
        """Run the job; return its exit code and rank 0's summary, which is empty on a host that serves another one."""
        from mtrain.cluster import many_hosts, start

        if self._hosts:
            result = many_hosts.run(self._brief(loaded, "allreduce", name))
        else:
            where = start.created(loaded, start.Where(run_dir=Path(name), checkpoint=None), name=name)
            result = start.run_job(loaded, where, mode="allreduce", quiet=True)
            if result.code == 0:
                shutil.rmtree(where.run_dir, ignore_errors=True)
        return result.code, result.summary

    def _job(self, backend: str) -> "Loaded":
        """Return the overrides spec for the backend that it selects.

        For any other backend ``PLAIN``, on the same hosts.
        """
        own = backend == self._loaded.spec.backend.name
        overrides = [text for text in self._params["overrides"] if own or text.startswith("cluster.")]
        config = self._params["config"] if own else PLAIN
        params = {**self._params, "backend": backend, "config": config, "nproc_per_node": None}
        ranks = self._ranks(
            load_job({**self._params, "backend": backend, "config": config, "overrides": overrides}), backend
        )
        slots = self._loaded.spec.cluster.slots
        size = sum(slots) if slots else ranks * max(1, len(self._hosts))
        overrides += [f"cluster.nproc_per_node={ranks}", f"train.batch_size={size}", "train.accumulate=1"]
        overrides += ["cluster.max_restarts=0", f"report.dir={FOLDER.expanduser()}", "report.display=quiet"]
        return load_job({**params, "overrides": overrides})

    def _ranks(self, loaded: "Loaded", backend: str) -> int:
        """Return the number of ranks on each host.

        It is the requested number, else one on each of several hosts, else ``RANKS`` here, or fewer where there are
        fewer GPUs.
        """
        from mtrain.cluster import start
        from mtrain.jobs.plan import TYPED

        requested = loaded.spec.cluster.nproc_per_node
        if self._rendezvous(backend) == "none":
            return 1
        typed = loaded.origin("cluster.nproc_per_node").kind in TYPED or self._params["config"] is not None
        if typed and requested != "auto":
            return requested
        return 1 if self._hosts else min(RANKS, start.here(loaded).devices or RANKS)


def _in_words(summary: Mapping[str, Any]) -> str:
    """Word the result of an all-reduce."""
    hosts, ranks = summary["hosts"], summary["ranks"]
    where = f"over {', '.join(hosts)}" if len(hosts) > 1 else "on this host"
    return (
        f"{ranks} rank{'s' if ranks > 1 else ''} {where}, first sum {summary['seconds']:.1f} s after the start of rank 0, "
        f"4 MiB at {summary['mib_per_s']:.0f} MiB/s"
    )


@contextlib.contextmanager
def _captured_output() -> Iterator[io.StringIO]:
    """Capture what a job prints, on both streams."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield output
