"""The metrics of a host's ranks for Prometheus, served by the process that starts and watches these ranks.

That process lives through restarts and answers while ranks hang. ``host_collector.py`` says what it answers,
``metrics_server.py`` how. The library ``prometheus_client`` is loaded only where a job asks for metrics.
"""

import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain.core.record_files import LIVE, live_file
from mtrain.errors import UsageError
from mtrain.jobs.run.metrics_place import OWN, AttemptFacts, MetricsPlace
from mtrain.spec import remedies
from mtrain.system import placement

if TYPE_CHECKING:
    from mtrain.jobs.run.metrics_server import MetricsServer
    from mtrain.spec.model import Spec

KEY = "report.metrics_port"
LIBRARY = "prometheus_client"
READ_S = 40.0
"""Seconds for which a job that has failed waits for Prometheus, which reads every 15 to 30 s as a rule."""


class HostMetrics:
    """The metrics of one host: nothing until ``open``, then an address that answers until ``close``."""

    def __init__(self) -> None:
        self._server: MetricsServer | None = None
        self._folder: Path | None = None
        self._began = time.time()
        self._facts = AttemptFacts(hosts=0, restarts=0, ranks=range(0))
        self._failed = False
        self._hangs = False
        self._ranks: set[int] = set()
        """All ranks that this host has had; those of an elastic job change."""

    def open(self, place: MetricsPlace | None, run_dir: Path) -> None:
        """Answer at ``place``, with the metrics of the run in ``run_dir``. Without a place, or once open, do nothing.

        Raises:
            UsageError: the port is taken, the address is none of this host, or the library is not installed.
        """
        if place is None or self._server is not None:
            return
        check_library()
        from mtrain.jobs.run.host_collector import HostCollector
        from mtrain.jobs.run.metrics_server import MetricsServer

        self._folder, self._began = run_dir, time.time()
        collector = HostCollector(
            run_dir,
            facts=lambda: self._facts,
            began=self._began,
            failed=lambda: self._failed,
            hangs=lambda: self._hangs,
        )
        self._server = MetricsServer(listener_address(place), place.port, collector, names=(place.address,))

    def begin(self, facts: AttemptFacts) -> None:
        """Answer with the facts of the attempt that begins now; forget ranks that this host no longer has."""
        if self._folder is not None:
            # A resumed run has files of its former job, whose values would be served until ranks write their first.
            kept = self._facts.ranks if facts.restarts else range(0)
            for rank in facts.ranks:
                if rank not in kept:
                    live_file(self._folder, rank).unlink(missing_ok=True)
        self._facts, self._hangs = facts, False
        self._ranks.update(facts.ranks)

    def note_hang(self, report: Mapping[str, Any]) -> None:
        """Note what was said of a hang, or that it is over. A remark, as on a long computation, counts as none."""
        self._hangs = report.get("hang") not in (None, "slow")

    def fail(self, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Tell that the job has failed, and wait until that was read, for ``READ_S`` at most; ``stop`` returning True ends that."""
        self._failed = True
        # The port would be closed before, and nobody could tell a job that has failed from one that is done. Where nobody has
        # read any metrics so far, nobody is waited for.
        if self._server is not None and self._server.was_asked:
            self._server.wait_for_reader(timeout_s=READ_S, stop=stop)

    def close(self) -> None:
        """Answer no longer, and remove the ranks' files. It may be called twice."""
        if self._server is None or self._folder is None:
            return
        self._server.close()
        self._server = None
        for rank in self._ranks:
            live_file(self._folder, rank).unlink(missing_ok=True)
        try:
            (self._folder / LIVE).rmdir()
        except OSError:  # Other hosts may have files in it.
            return


def listener_address(place: MetricsPlace) -> str:
    """Return the address to listen at; that of a name is one of this host's own.

    Raises:
        UsageError: it is no address of this host.
    """
    if placement.is_address(place.address):
        return place.address
    own = next((address for address in placement.resolve(place.address) if placement.is_own(address)), None)
    if own is None:
        raise UsageError(
            f"report.metrics_address: {place.address} is no address of this host; give 0.0.0.0 for all addresses of each "
            "host, or leave it out for 127.0.0.1"
        )
    return own


def check(spec: "Spec") -> None:
    """Refuse metrics that this host could not serve.

    Raises:
        UsageError: the port is taken, the address is none of this host, or the library is not installed.
    """
    place = MetricsPlace.of(spec, "train")
    if place is None:
        return
    check_library()
    if place.address != OWN:  # The address of a host is one that it has, and the port is tried when the job begins.
        from mtrain.jobs.run.metrics_server import listening

        listening(place.address, place.port).close()


def check_library() -> None:
    """Refuse metrics where the library that writes them is missing.

    Raises:
        UsageError: it is.
    """
    if find_spec(LIBRARY) is None:
        raise UsageError(
            f"{KEY}: the package prometheus_client is not installed; install it with: {remedies.install('prometheus')}"
        )
