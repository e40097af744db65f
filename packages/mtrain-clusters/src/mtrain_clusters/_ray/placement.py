"""The nodes of a Ray cluster on which the hosts of a job are placed."""

import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mtrain.errors import UsageError
from mtrain.spec import remedies
from mtrain_clusters._ray import internals

# Ray itself would try an address that does not answer for minutes.
CONNECT_S = 5.0
"""Seconds that opening a connection to Ray may take."""
LOOK_S = 0.5
"""Seconds between two looks at a placement that is not complete."""


def library() -> Any:
    """Return the module ``ray``.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            f"cluster.name: 'ray' given, but Ray is not installed here ({error}); install it with: "
            + remedies.install("mtrain-clusters[ray]")
        ) from error
    return ray


def connect(address: str) -> Any:
    """Connect this process to the Ray cluster at ``address``, and return the module ``ray``.

    Raises:
        UsageError: no Ray cluster answers there.
    """
    ray = library()
    host, colon, port = address.partition("://")[2].rpartition(":") if "://" in address else address.rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        except OSError as error:
            raise UsageError(
                f"no Ray cluster answers at {address}: {error.strerror or error}; start one with `ray start --head`, or "
                "give its address with -o cluster.options.address=HOST:PORT or RAY_ADDRESS"
            ) from error
    # Ray replaces the handler of SIGTERM by one that ends this process before the ranks have saved.
    former = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="CRITICAL", ignore_reinit_error=True)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray cluster was found ({_first_line(error)}); start one with `ray start --head`, or give its address with "
            "-o cluster.options.address=HOST:PORT or RAY_ADDRESS"
        ) from error
    finally:
        signal.signal(signal.SIGTERM, former)
    internals.silence(ray)
    return ray


@dataclass(kw_only=True)
class Placement:
    """A placement group of one bundle for each host, every bundle on another node."""

    ray: Any
    hosts: int
    cpus: float
    gpus: float | None
    """GPUs of each host; None: as many as the nodes have."""
    resources: Mapping[str, float]
    note: Callable[[str], None]
    group: Any = None
    _each: Mapping[str, float] = field(default_factory=dict)
    """The resources of one host, as Ray names them."""
    _bundles: list[int] = field(default_factory=list)
    """For each host, the index of its bundle."""

    def request(self) -> None:
        """Ask Ray for the nodes, once."""
        if self.group is None:
            from ray.util.placement_group import placement_group

            demand = {"CPU": self.cpus, "GPU": self._gpus(), **self.resources}
            self._each = {name: amount for name, amount in demand.items() if amount}
            self.group = placement_group([dict(self._each)] * self.hosts, strategy="STRICT_SPREAD")

    def wait(self, deadline: float, *, stop: Callable[[], bool]) -> bool:
        """Wait until Ray has placed all hosts, and return whether it has. ``deadline``: in monotonic time.

        A note says for what the job is waiting, again whenever a node has come or gone.
        """
        self.request()
        shown, began = "", time.monotonic()
        while not self.group.wait(LOOK_S):
            if stop() or time.monotonic() > deadline:
                return False
            pending = self.pending()
            if pending != shown and time.monotonic() - began > 1.0:
                shown = pending
                self.note(f"waiting for Ray, up to {max(0.0, deadline - time.monotonic()):.0f} s: {pending}")
        if not self._bundles:
            self._order()
        return True

    def pending(self) -> str:
        """Return what the job wants and which nodes there are, in one sentence."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        has = ", ".join(sorted(f"{node['NodeManagerAddress']} ({_words(node['Resources'])})" for node in alive))
        wanted = f"{self.hosts} nodes with {_words(self._each)} free on each"
        return f"the job needs {wanted}; Ray has {len(alive)}: {has}"

    def strategy(self, node: int) -> Any:
        """Return where Ray is to place the actor of host number ``node``."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self._bundles[node])

    def options(self, node: int) -> dict[str, Any]:
        """Return the options of the actor of host number ``node``: it takes all that its bundle holds."""
        each = dict(self._each)
        return {
            "num_cpus": each.pop("CPU", 0),
            "num_gpus": each.pop("GPU", 0),
            "resources": each,
            "scheduling_strategy": self.strategy(node),
        }

    def address(self, node_id: str) -> str:
        """Return the address of a node."""
        return str(next(each["NodeManagerAddress"] for each in self.ray.nodes() if each["NodeID"] == node_id))

    def is_dead(self, node_id: str) -> bool:
        """Return whether Ray has lost a node."""
        with suppress(Exception):  # Ray itself may be gone.
            return not any(each["NodeID"] == node_id and each["Alive"] for each in self.ray.nodes())
        return True

    def release(self) -> None:
        """Give all nodes back, and disconnect."""
        with suppress(Exception):  # Ray itself may be gone.
            if self.group is not None:
                from ray.util.placement_group import remove_placement_group

                remove_placement_group(self.group)
        former = signal.getsignal(signal.SIGTERM)
        self.ray.shutdown()
        signal.signal(signal.SIGTERM, former)

    def _order(self) -> None:
        """Give every host its bundle: the node of this process is the first host, so that results are here."""
        from ray.util.placement_group import placement_group_table

        places = placement_group_table(self.group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in self.ray.nodes()}
        repeated = sorted({name for name in addresses.values() if list(addresses.values()).count(name) > 1})
        used = [addresses[node_id] for node_id in places.values()]
        if len(set(used)) < len(used):
            raise UsageError(
                f"Ray has several nodes with the address {repeated[0]}, where each host of a job needs an address of its own; "
                "start them with `ray start --node-ip-address`"
            )
        here = self.ray.get_runtime_context().get_node_id()
        # Ray numbers bundles as it likes; by address, hosts keep their order from start to start.
        self._bundles = sorted(places, key=lambda index: (places[index] != here, addresses[places[index]]))

    def _gpus(self) -> float:
        """Return the GPUs to ask for on each node: as many as each of the best nodes has, if the user leaves it open."""
        if self.gpus is not None:
            return self.gpus
        counts = sorted((node["Resources"].get("GPU", 0) for node in self.ray.nodes() if node["Alive"]), reverse=True)
        return float(counts[self.hosts - 1]) if len(counts) >= self.hosts else 0.0


def _words(resources: Mapping[str, float]) -> str:
    """Return amounts of resources for people, without those that every node has."""
    hidden = ("node:", "memory", "object_store_memory", "bundle_group")
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()) if not name.startswith(hidden))


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
