"""Agents on the nodes of a Ray cluster, see ``mtrain.jobs.hosts.hosts.Gathering``."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import mtrain
from mtrain.core.interfaces import HostedJob
from mtrain.jobs.hosts import start_failures
from mtrain.jobs.hosts.channel import Lost
from mtrain.jobs.hosts.hosts import Member
from mtrain.jobs.hosts.messages import Message
from mtrain.jobs.hosts.start_failures import Means
from mtrain.jobs.preflight.findings import Finding
from mtrain_clusters._ray.bridge import Bridge
from mtrain_clusters._ray.options import RayOptions
from mtrain_clusters._ray.placement import Placement, connect
from mtrain_clusters._ray.wire import Wire, end_wires

CLOSING_S = 5.0
"""Seconds that an agent may take to end after its channel was closed."""
FLUSH_S = 0.5
"""Seconds that the last messages to a host may take."""
# Ray starts a process for each, and may first install what the job's ``runtime_env`` asks for.
START_S = 30.0
"""Least seconds that agents have to come up once Ray has placed them."""
POLL_S = 0.2
LONGER = "give an autoscaler longer with -o cluster.join_timeout_s=SECONDS"
# A call that waits for bytes, one that takes some, and those that end the actor.
CALLS = 4
"""Calls of an actor that may run at the same time."""


class RayAgents:
    """Starts an agent on each node of a placement group. It connects to Ray when it first gathers."""

    forwards = True

    def __init__(self, job: HostedJob, options: RayOptions, *, address: str) -> None:
        """``address``: the address of the Ray cluster, or "auto"."""
        self._job, self._options, self._address = job, options, address
        self._means = Means(name="ray", python=job.agent[0], python_key="cluster.options.python")
        self._placement: Placement | None = None
        self._wires: dict[int, Wire] = {}
        self._addresses: dict[int, str] = {}
        """The address that each host had last."""

    def gather(
        self, nodes: Sequence[int], *, timeout_s: float, stop: Callable[[], bool]
    ) -> tuple[dict[int, Member], list[Finding]]:
        """Wait until Ray has placed ``nodes``, start their agents, and wait for their hellos.

        Raises:
            UsageError: no Ray cluster answers, or two of its nodes have the same address.
        """
        placement = self._place()
        deadline = time.monotonic() + timeout_s
        if not placement.wait(deadline, stop=stop):
            return {}, [] if stop() else [self._explain_unplaced(placement, timeout_s)]
        self.let_go(nodes)
        self._wires |= {node: self._start_actor(placement, node) for node in nodes}
        deadline = max(deadline, time.monotonic() + START_S)
        members, findings, failed = {}, [], []
        for node in nodes:
            wire = self._wires[node]
            greeting = self._hear(wire, deadline, stop=stop)
            if isinstance(greeting, Finding):
                findings.append(greeting)
                failed.append(node)
            else:
                wire.channel.peer = wire.host
                former = self._addresses.get(node, wire.host)
                if former != wire.host:
                    self._job.note(f"Ray has placed {wire.host} in place of {former}")
                self._addresses[node] = wire.host
                members[node] = Member(node=node, host=wire.host, channel=wire.channel, hello=greeting)
        self.let_go(failed)
        return members, findings

    def arrivals(self, nodes: Sequence[int]) -> dict[int, Member]:
        """Return nothing: nodes that Ray places anew are taken when the job starts again, see ``gather``."""
        return {}

    def leave_alone(self, node: int, *, seconds: float) -> None:
        """Do nothing: no node is fetched while the job runs."""

    def last_words(self, node: int) -> str:
        """Return how the agent of a host, its actor or its node ended; "" where that is unknown."""
        return self._wires[node].last_words() if node in self._wires else ""

    def let_go(self, nodes: Sequence[int]) -> None:
        """End the connections to hosts."""
        wires = [wire for node in nodes if (wire := self._wires.pop(node, None)) is not None]
        end_wires(wires, wait_s=CLOSING_S, flush_s=FLUSH_S)

    def close(self) -> None:
        """End all connections, give the nodes back, and disconnect from Ray."""
        self.let_go(list(self._wires))
        if self._placement is not None:
            self._placement.release()
            self._placement = None

    def _place(self) -> Placement:
        if self._placement is None:
            options = self._options
            self._placement = Placement(
                ray=connect(self._address),
                hosts=len(self._job.hosts),
                cpus=options.cpus,
                gpus=options.gpus,
                resources=options.resources,
                note=self._job.note,
            )
        return self._placement

    def _start_actor(self, placement: Placement, node: int) -> Wire:
        """Start the actor of a host, and with it the agent."""
        ray = placement.ray
        # By value: the Python of Ray's workers may have no mtrain, which is then reported as on any other host.
        ray.cloudpickle.register_pickle_by_value(_module_of(Bridge))
        try:
            actor_class = ray.remote(Bridge).options(max_concurrency=CALLS, max_restarts=0, **placement.options(node))
            actor = actor_class.remote(list(self._job.agent), {})
        finally:
            ray.cloudpickle.unregister_pickle_by_value(_module_of(Bridge))
        return Wire(placement, actor, host=self._job.hosts[node])

    def _hear(self, wire: Wire, deadline: float, *, stop: Callable[[], bool]) -> Message | Finding:
        """Wait for the hello of an agent; return it, or a finding that says why there is none."""
        began = time.monotonic()
        try:
            while time.monotonic() < deadline and not stop():
                message = wire.channel.wait(POLL_S)
                if message is not None and message.get("event") == "hello":
                    return self._check_version(wire, message)
        except Lost:
            return self._failure(wire)
        return self._finding(
            wire.host,
            f"no agent has come up for {time.monotonic() - began:.0f} s",
            f"see `ray status` and the logs of Ray on that node, or {LONGER}",
        )

    def _check_version(self, wire: Wire, hello: Message) -> Message | Finding:
        if hello.get("version") != mtrain.__version__:
            text = f"has mtrain {hello.get('version')}, expected {mtrain.__version__} as here"
            return self._finding(wire.host, text, "install the same there")
        return hello

    def _failure(self, wire: Wire) -> Finding:
        """Return a finding that says why an agent ended before its hello."""
        words = wire.last_words()
        if wire.status is None:
            return self._finding(wire.host, words or "its connection was closed", "see the logs of Ray on that node")
        python = self._means.python
        return start_failures.explain(
            wire.host, status=wire.status, printed=wire.lines, python=python, local=False, means=self._means
        )

    def _explain_unplaced(self, placement: Placement, wait_s: float) -> Finding:
        return self._finding(
            ", ".join(self._job.hosts),
            f"not placed by Ray within {wait_s:.0f} s: {placement.pending()}",
            f"add nodes, ask for less of each (-o cluster.options.cpus=N), or {LONGER}",
        )

    def _finding(self, host: str, text: str, remedy: str) -> Finding:
        return Finding(check="ray", state="bad", hosts=(host,), text=text, remedy=remedy)


def _module_of(kind: type[Any]) -> Any:
    import sys

    return sys.modules[kind.__module__]
