"""Compare the facts of all hosts: one finding for each problem, and one for each check without problems."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.jobs.preflight import majority
from mtrain.jobs.preflight.findings import Finding
from mtrain.jobs.preflight.partners import partners
from mtrain.spec import remedies
from mtrain.spec.hostnames import FEW
from mtrain.system.placement import is_address, is_link_local, is_loopback

SKEW_S = 2.0
"""Largest accepted difference between clocks, in seconds. A larger one confuses logs and the order of checkpoints."""
SHM_BYTES = 256 << 20
"""Size of /dev/shm below which there is a warning: NCCL keeps its buffers for the ranks of one host there."""
REMEDY = "make it the same on every host"


@dataclass(kw_only=True)
class HostFacts:
    """The facts about one host, with the requirements that they are compared with."""

    index: int
    """Index of the host in the list of hosts."""
    required: Mapping[str, Any]
    """Its requirements, see ``requirements.py``."""
    facts: Mapping[str, Any]
    """The answer of ``facts.collect`` on this host."""
    skew_s: tuple[float, float] = (0.0, 0.0)
    """Bounds of the difference between its clock and this machine's, in seconds: (least, most)."""

    @property
    def address(self) -> str:
        """Return the host's address as the spec has it."""
        return str(self.required["address"])

    @property
    def label(self) -> str:
        """Return the host's name for messages: its address, and the name that it reports where that differs."""
        name = self.facts["host"]
        return self.address if name == self.address else f"{self.address} ({name})"

    @property
    def own(self) -> dict[str, str]:
        """Return the host's own addresses, and the interface of each."""
        return {address: interface for interface, address in self.facts["addresses"]}

    @property
    def meeting_address(self) -> str | None:
        """Return the host's own address at which the others reach it.

        None: the address in the spec is not this host's.
        """
        candidates = [each for each in self.addresses_of(self.address) if each in self.own or is_loopback(each)]
        return min(candidates, key=is_loopback, default=None)

    def addresses_of(self, name: str) -> list[str]:
        """Return the addresses that a name has on this host."""
        return list(self.facts["names"].get(name, ()))


def compare(hosts: Sequence[HostFacts]) -> list[Finding]:
    """Run all checks on the hosts that answered; return the findings, check by check."""
    if not hosts:
        return []
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        problems = check(hosts)
        if isinstance(problems, str):
            problems = [Finding(check=name, state="ok", text=problems)] if problems else []
        findings += problems
    return findings


def _bad(check: str, host: HostFacts, text: str, remedy: str) -> Finding:
    return Finding(check=check, state="bad", hosts=(host.label,), text=text, remedy=remedy)


def _warning(check: str, host: HostFacts, text: str, remedy: str) -> Finding:
    return Finding(check=check, state="warning", hosts=(host.label,), text=text, remedy=remedy)


# ---------------------------------------------------------------------------------------------------- addresses, clocks
def _addresses(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    # If every host has a loopback address, all of them are meant to be on this machine, which is a trial.
    one_machine = all(is_loopback(host.meeting_address or "::") for host in hosts)
    problems = [problem for host in hosts if (problem := _own_address(host, one_machine=one_machine))]
    if not one_machine:
        problems += [
            _bad("address", host, f"is the same machine as {twin.label}", "name it once")
            for twin, host in _twins(hosts)
        ]
    for place, host in enumerate(hosts):
        others = (hosts[other] for other in partners(place, len(hosts)))
        problems += [problem for other in others if (problem := _name_of_other(host, other))]
    if problems:
        return problems
    if len(hosts) <= FEW:
        return ", ".join(_address_in_words(host) for host in hosts)
    interfaces = {host.label: str(host.own.get(host.meeting_address or "", host.meeting_address)) for host in hosts}
    return f"{len(hosts):,} hosts at addresses of their own: {majority.in_words(interfaces)}"


def _twins(hosts: Sequence[HostFacts]) -> list[tuple[HostFacts, HostFacts]]:
    """Return the pairs of hosts that are one machine."""
    first: dict[str, HostFacts] = {}
    pairs = [(first.setdefault(host.facts["identity"], host), host) for host in hosts if host.facts["identity"]]
    return [pair for pair in pairs if pair[0] is not pair[1]]


def _address_in_words(host: HostFacts) -> str:
    """Word where a host is reached, and which address is not used though its own name says so."""
    # Debian and Ubuntu map a host's own name to 127.0.1.1, which no other host can use.
    name, address = host.facts["host"], host.meeting_address or ""
    unused = [each for each in host.addresses_of(name) if is_loopback(each)]
    return f"{name} {host.own.get(address, address)}" + (f" (not {unused[0]}, as its own name says)" if unused else "")


def _own_address(host: HostFacts, *, one_machine: bool) -> Finding | None:
    """Return a problem unless the host's address in the spec is its own, and one that the others can use."""
    # Nobody would put a loopback or link-local address into the spec, so a message names the others.
    usable = {each: name for each, name in host.own.items() if not (is_loopback(each) or is_link_local(each))}
    mine = ", ".join(f"{address} ({name})" for address, name in usable.items()) or "none"
    addresses = host.addresses_of(host.address)
    if not addresses:
        remedy = "give its address in cluster.ips, or enter the name in its /etc/hosts"
        return _bad(
            "address", host, f"the name {host.address} is not known on that host itself{_describe_wait(host)}", remedy
        )
    if host.meeting_address is None:
        text = f"{host.address} is no address of this host; it has {mine}"
        return _bad("address", host, text, "correct cluster.ips")
    if not one_machine and is_loopback(host.meeting_address):
        text = (
            f"{host.address} means {host.meeting_address} on that host itself, where no other host reaches it; it has "
            f"{mine}"
        )
        return _bad("address", host, text, "give that address in cluster.ips, or correct its /etc/hosts")
    return None


def _name_of_other(host: HostFacts, other: HostFacts) -> Finding | None:
    """Return a problem unless the name of ``other`` leads there from ``host``."""
    if is_address(other.address):
        return None
    addresses = host.addresses_of(other.address)
    if not addresses:
        text = f"does not know the name {other.address}{_describe_wait(host)}"
        return _bad("address", host, text, "give addresses in cluster.ips, or enter the name in its /etc/hosts")
    if not set(addresses) & {address for address in other.own if not is_loopback(address)}:
        text = f"takes {other.address} for {', '.join(addresses)}, which is no address of that host"
        return _bad("address", host, text, "give addresses in cluster.ips, or correct its /etc/hosts")
    return None


def _describe_wait(host: HostFacts) -> str:
    """Return how long the leader has waited for a name to become known on the host, for a message."""
    waited_s = host.required.get("names_s")
    return "" if waited_s is None else f", also not within {waited_s} s"


def _clocks(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    """Compare clocks with the first host's, counting only differences that the round trip cannot explain."""
    first = hosts[0]
    problems = []
    for host in hosts[1:]:
        # Answers take their time, so each difference is known within bounds. Only what is certain counts.
        low, high = host.skew_s[0] - first.skew_s[1], host.skew_s[1] - first.skew_s[0]
        certain = low if low > 0 else -high if high < 0 else 0.0
        if certain > SKEW_S:
            way = "ahead of" if low > 0 else "behind"
            text = f"its clock is {certain:.1f} s {way} that of {first.label}, expected within {SKEW_S:g} s"
            problems.append(_warning("clock", host, text, "set it, for example with chrony or systemd-timesyncd"))
    return problems or f"within {SKEW_S:g} s of each other"


# ------------------------------------------------------------------------------------------------ software, data, files
def _pythons(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    problems = []
    usable = _with_python(hosts)
    for host in (host for host in hosts if host not in usable):
        remedy = "set backend.python to a path that leads to the interpreter of the ranks on every host"
        problems.append(_bad("python", host, host.facts["python"]["error"], remedy))
    if not usable:
        return problems
    usual = majority.reference(usable, lambda host: str(host.facts["python"]["python"]))
    expected = usual.facts["python"]["python"]
    for host in usable:
        version = host.facts["python"]["python"]
        if version != expected:
            # Another minor release may lack what code of plugins needs; patch releases only mend.
            near = version.split(".")[:2] == expected.split(".")[:2]
            text = f"{host.facts['python']['executable']} is Python {version}, expected {expected} as on {usual.label}"
            problems.append((_warning if near else _bad)("python", host, text, REMEDY))
    return problems or f"{expected}: {usual.facts['python']['executable']}"


def _with_python(hosts: Sequence[HostFacts]) -> list[HostFacts]:
    return [host for host in hosts if "error" not in host.facts["python"]]


def _mtrain(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    problems = []
    usable = _with_python(hosts)
    with_code = [host for host in usable if host.facts["python"]["code"]]
    expected = (
        majority.reference(with_code, lambda host: str(host.facts["python"]["code"]["digest"])) if with_code else None
    )
    for host in usable:
        python, code = host.facts["python"]["executable"], host.facts["python"]["code"]
        if code is None:
            text = f"{python} has no mtrain"
            problems.append(_bad("mtrain", host, text, f"install it there with: {remedies.install('', python=python)}"))
        elif host.facts["python"]["modules"].get("mtrain_trace", "") is None:
            text, remedy = f"{python} has no mtrain-trace, which mtrain needs", remedies.install("", python=python)
            problems.append(_bad("mtrain", host, text, f"install both there with: {remedy}"))
        elif expected is not None and code["digest"] != expected.facts["python"]["code"]["digest"]:
            text = (
                f"the source in {code['folder']} is not that of {expected.label} in "
                f"{expected.facts['python']['code']['folder']}"
            )
            problems.append(
                _bad("mtrain", host, text, "install the same version, or check out the same commit, on every host")
            )
    if problems or expected is None:
        return problems
    return f"the same source on every host ({expected.facts['python']['code']['digest'][:12]})"


def _packages(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    problems = []
    usable = _with_python(hosts)
    if not usable:
        return ""
    # What the backend imports must be the same on all hosts, or ranks may not even meet.
    for name in usable[0].required["modules"]:
        expected = majority.reference(usable, lambda host: host.facts["python"]["modules"][name] or "")  # noqa: B023
        for host in usable:
            remedy = host.required["modules"][name]
            actual, reference = host.facts["python"]["modules"][name], expected.facts["python"]["modules"][name]
            if actual is None:
                problems.append(_bad("packages", host, f"{host.facts['python']['executable']} has no {name}", remedy))
            elif reference is not None and actual != reference:
                text = (
                    f"{name} is of {actual or 'unknown version'}, expected {reference or 'unknown version'} as on "
                    f"{expected.label}"
                )
                problems.append(_bad("packages", host, text, REMEDY))
    # What reporters and readers of data import may differ: only rank 0, or each rank by itself, uses it.
    for host in usable:
        for name, remedy in host.required.get("plugin_modules", {}).items():
            if host.facts["python"]["modules"][name] is None:
                problems.append(_bad("packages", host, f"{host.facts['python']['executable']} has no {name}", remedy))
    expected = majority.reference(usable, lambda host: tuple(sorted(host.facts["python"]["packages"].items())))
    for host in usable:
        actual, reference = host.facts["python"]["packages"], expected.facts["python"]["packages"]
        differing = [
            name for name in sorted(actual.keys() | reference.keys()) if actual.get(name) != reference.get(name)
        ]
        if differing:
            differences = ", ".join(
                f"{name} {actual.get(name, 'none')} (expected {reference.get(name, 'none')})" for name in differing
            )
            problems.append(_warning("packages", host, f"differs from {expected.label}: {differences}", REMEDY))
    backend = expected.facts["python"]["modules"]
    modules = [text for name in expected.required["modules"] if (text := backend[name])]
    return (
        problems
        or f"{', '.join(modules)} and {len(expected.facts['python']['packages'])} others, the same on every host"
    )


def _data(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    if any(host.facts["data"] is None for host in hosts):
        return ""
    problems = []
    for host in hosts:
        data = host.facts["data"]
        if "error" in data:
            remedy = "copy the data there, mount the folder, or set data.root to where it is on every host"
            problems.append(_bad("data", host, f"data.root {data['root']}: {data['error']}", remedy))
        elif not data["complete"]:
            text = f"data.root {data['root']} is too large or too slow to be compared in time"
            problems.append(_warning("data", host, text, "make sure that it is the same on every host"))
    listed = [host for host in hosts if host.facts["data"].get("complete")]
    usual = majority.reference(listed, lambda host: str(host.facts["data"]["digest"])) if listed else hosts[0]
    for host in listed:
        expected, actual = usual.facts["data"], host.facts["data"]
        if actual["digest"] != expected["digest"]:
            text = f"data.root {actual['root']}: other files ({_count_files(actual)}; {usual.label} has {_count_files(expected)})"
            problems.append(_bad("data", host, text, "copy it anew, for example with rsync -a --delete"))
    return problems or f"data.root is the same on every host: {_count_files(usual.facts['data'])}"


def _count_files(data: Mapping[str, Any]) -> str:
    some = "" if data["sized"] == data["files"] else f", sizes of {data['sized']:,} compared"
    return f"{data['files']:,} files, {data['bytes']:,} bytes{some}"


def _files(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    problems = []
    for key in hosts[0].facts["files"]:
        readable = [host for host in hosts if "error" not in host.facts["files"][key]]
        for host in (host for host in hosts if host not in readable):
            actual = host.facts["files"][key]
            problems.append(_bad("files", host, f"{key}: {actual['path']}: {actual['error']}", "copy it there"))
        if not readable:
            continue
        usual = majority.reference(readable, lambda host: _content(host.facts["files"][key]))  # noqa: B023
        for host in readable:
            actual, expected = host.facts["files"][key], usual.facts["files"][key]
            if _content(actual) != _content(expected):
                text = f"{key}: {actual['path']} is not the file that {usual.label} has ({actual['bytes']:,} and "
                problems.append(_bad("files", host, f"{text}{expected['bytes']:,} bytes)", "copy it anew"))
    names = ", ".join(hosts[0].facts["files"])
    return problems or (f"{names}: the same on every host" if names else "")


def _content(file: Mapping[str, Any]) -> Hashable:
    return file["bytes"], file["digest"]


# ------------------------------------------------------------------------------------------------- ports, disk, devices
def _ports(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    problems, free = [], 0
    for host in hosts:
        for port, key in host.required["ports"]:
            obstacle = host.facts["ports"][str(port)]
            free += not obstacle
            if obstacle:
                text = f"{key}: {port} is taken on {host.address}: {obstacle}"
                automatic = f", or `auto` for {key}" if key.startswith("cluster.") else ""
                problems.append(_bad("ports", host, text, f"give another port{automatic}, or end what listens there"))
    return problems or (
        f"{free} ports that the spec fixes are free" if free else "the spec fixes none; free ones are taken"
    )


def _disk(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    problems = []
    for host in hosts:
        disk, room = host.facts["disk"], host.required["bytes"]
        if "error" in disk or not disk["writable"]:
            text = f"the run folder cannot be made: {disk['path']} {disk.get('error', 'is not writable')}"
            problems.append(_bad("disk", host, text, "set report.dir to a folder that can be written on every host"))
        elif disk["free"] < room["least"]:
            text = f"{_size(disk['free'])} free at {disk['path']}, expected {_size(room['least'])} at the least"
            problems.append(_bad("disk", host, text, "make room, or set report.dir to another disk"))
        elif disk["free"] < room["plenty"]:
            text = f"{_size(disk['free'])} free at {disk['path']}; checkpoints of a large model may need more"
            problems.append(_warning("disk", host, text, "make room, or keep fewer: checkpoint.keep_last"))
    least = min(hosts, key=lambda host: host.facts["disk"].get("free", 0))
    return problems or f"{_size(least.facts['disk']['free'])} free or more"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"


def _devices(hosts: Sequence[HostFacts]) -> list[Finding] | str:
    present = [host.facts["devices"]["present"] for host in hosts]
    problems = []
    for host, count in zip(hosts, present, strict=True):
        needed, why = _least_gpus(host.required, any_there=any(present))
        if count < needed:
            text = f"{count} GPUs are there, {needed} are asked for ({why})"
            problems.append(_bad("devices", host, text, "correct that, or let ranks compute on the CPU: --devices cpu"))
        elif needed and host.facts["shm"].get("total", SHM_BYTES) < SHM_BYTES:
            text = f"/dev/shm holds {_size(host.facts['shm']['total'])}, NCCL may need {_size(SHM_BYTES)}"  # noqa: S108 - named only
            problems.append(_warning("devices", host, text, "enlarge it, in a container with --shm-size=1g"))
    # A step ends with its slowest rank.
    kinds = {tuple(sorted(set(host.facts["devices"]["models"]))) for host in hosts}
    if problems:
        return problems
    if len(kinds) > 1:
        by_host = {host.label: ", ".join(sorted(set(host.facts["devices"]["models"]))) or "none" for host in hosts}
        if len(hosts) > FEW:
            kinds_by_host = majority.in_words(by_host)
        else:
            kinds_by_host = "; ".join(f"{label}: {kind}" for label, kind in by_host.items())
        text = f"the GPUs are of different kinds ({kinds_by_host}): all will wait for the slowest"
        return [Finding(check="devices", state="warning", text=text)]
    return f"{min(present)} GPUs or more" if any(present) else "no GPUs: ranks compute on the CPU"


def _least_gpus(required: Mapping[str, Any], *, any_there: bool) -> tuple[int, str]:
    """Return how many GPUs a host must have, and which setting requires them."""
    if required["device"] == "cpu" or required["devices"] == []:
        return 0, ""
    if required["devices"] is not None:
        return max(required["devices"]) + 1, f"cluster.devices: {required['devices']}"
    if required["device"] == "cuda":
        return 1, "backend.options.device: cuda"
    return (int(required["slots"]), "one for each rank, as other hosts have") if any_there else (0, "")


CHECKS: Mapping[str, Callable[[Sequence[HostFacts]], list[Finding] | str]] = {
    "address": _addresses,
    "clock": _clocks,
    "python": _pythons,
    "mtrain": _mtrain,
    "packages": _packages,
    "data": _data,
    "files": _files,
    "ports": _ports,
    "disk": _disk,
    "devices": _devices,
}
"""The checks by name, in their order. Each returns its problems, or a sentence for "ok"; "": there was nothing to
check."""
