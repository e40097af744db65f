"""Facts of all hosts, compared: one finding for each thing that is wrong, one for each check that nothing is wrong with."""

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain.cluster.preflight.findings import Finding
from mtrain.spec import remedies
from mtrain.system.placement import is_address

SKEW_S = 2.0
"""Between clocks; more confuses logs and what counts as newest."""
SHM_BYTES = 256 << 20
"""NCCL's buffers of the ranks of one host lie in /dev/shm."""
SAME = "make it the same on every host"


@dataclass(kw_only=True)
class Seen:
    """One host and what is known of it."""

    index: int
    wanted: Mapping[str, Any]
    facts: Mapping[str, Any]
    skew_s: tuple[float, float] = (0.0, 0.0)
    """Its clock less this machine's: at least, at most."""
    first_difference: str = ""
    """Of its data from the first host's."""

    @property
    def address(self) -> str:
        """As the spec has it."""
        return str(self.wanted["address"])

    @property
    def label(self) -> str:
        """For people: its address, and the name it gives itself."""
        name = self.facts["host"]
        return self.address if name == self.address else f"{self.address} ({name})"

    @property
    def own(self) -> dict[str, str]:
        """Its addresses, and the interface of each."""
        return {address: interface for interface, address in self.facts["addresses"]}

    @property
    def meeting_address(self) -> str | None:
        """The address of its own that the others use; None: what the spec says leads elsewhere."""
        meant = [each for each in self.named(self.address) if each in self.own or _is_loopback(each)]
        return min(meant, key=_is_loopback, default=None)

    def named(self, name: str) -> list[str]:
        """Addresses of a name as this host has them."""
        return list(self.facts["names"].get(name, ()))


def judged(seen: Sequence[Seen]) -> list[Finding]:
    """All findings about hosts that answered, check by check."""
    if not seen:
        return []
    found: list[Finding] = []
    for name, check in CHECKS.items():
        problems = check(seen)
        if isinstance(problems, str):
            problems = [Finding(check=name, state="ok", text=problems)] if problems else []
        found += problems
    return found


def _bad(check: str, host: Seen, text: str, remedy: str) -> Finding:
    return Finding(check=check, state="bad", hosts=(host.label,), text=text, remedy=remedy)


def _warning(check: str, host: Seen, text: str, remedy: str) -> Finding:
    return Finding(check=check, state="warning", hosts=(host.label,), text=text, remedy=remedy)


# ----------------------------------------------------------------------------------------------------- addresses, clocks
def _addresses(seen: Sequence[Seen]) -> list[Finding] | str:
    alone = all(_is_loopback(host.meeting_address or "::") for host in seen)  # one machine: a trial
    found = [problem for host in seen if (problem := _own_address(host, alone=alone))]
    if not alone:
        found += [
            _bad("address", host, f"is the same machine as {twin.label}", "name it once") for twin, host in _twins(seen)
        ]
    for host in seen:
        found += [problem for other in seen if other is not host and (problem := _name_of_other(host, other))]
    if found:
        return found
    return ", ".join(_placed(host) for host in seen)


def _twins(seen: Sequence[Seen]) -> list[tuple[Seen, Seen]]:
    """(one, another) that are one machine."""
    first: dict[str, Seen] = {}
    pairs = [(first.setdefault(host.facts["identity"], host), host) for host in seen if host.facts["identity"]]
    return [pair for pair in pairs if pair[0] is not pair[1]]


def _placed(host: Seen) -> str:
    """Where a host's address is; Debian and Ubuntu give its own name another one, which is then used by nobody."""
    name, at = host.facts["host"], host.meeting_address or ""
    aside = [each for each in host.named(name) if _is_loopback(each)]
    return f"{name} {host.own.get(at, at)}" + (f" (not {aside[0]}, as its own name says)" if aside else "")


def _own_address(host: Seen, *, alone: bool) -> Finding | None:
    """Whether the host is what the spec calls so, at an address that others can use."""
    mine = ", ".join(f"{address} ({name})" for address, name in host.own.items() if not _is_local(address)) or "none"
    meant = host.named(host.address)
    if not meant:
        remedy = "give its address in cluster.ips, or enter the name in its /etc/hosts"
        return _bad("address", host, f"the name {host.address} is not known on that host itself", remedy)
    if host.meeting_address is None:
        text = f"{host.address} is no address of this host; it has {mine}"
        return _bad("address", host, text, "correct cluster.ips")
    if not alone and _is_loopback(host.meeting_address):
        text = f"{host.address} means {host.meeting_address} on that host itself, where no other host reaches it; it has {mine}"
        return _bad("address", host, text, "give that address in cluster.ips, or correct its /etc/hosts")
    return None


def _name_of_other(host: Seen, other: Seen) -> Finding | None:
    if is_address(other.address):
        return None
    meant = host.named(other.address)
    if not meant:
        text = f"does not know the name {other.address}"
        return _bad("address", host, text, "give addresses in cluster.ips, or enter the name in its /etc/hosts")
    if not set(meant) & {address for address in other.own if not _is_loopback(address)}:
        text = f"takes {other.address} for {', '.join(meant)}, which is no address of that host"
        return _bad("address", host, text, "give addresses in cluster.ips, or correct its /etc/hosts")
    return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_local(address: str) -> bool:
    """Whether an address is none that anybody would type."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return parsed.is_loopback or parsed.is_link_local


def _clocks(seen: Sequence[Seen]) -> list[Finding] | str:
    """A difference counts as far as it is certain: answers take their time."""
    first = seen[0]
    found = []
    for host in seen[1:]:
        low, high = host.skew_s[0] - first.skew_s[1], host.skew_s[1] - first.skew_s[0]
        certain = low if low > 0 else -high if high < 0 else 0.0
        if certain > SKEW_S:
            way = "ahead of" if low > 0 else "behind"
            text = f"its clock is {certain:.1f} s {way} that of {first.label}, expected within {SKEW_S:g} s"
            found.append(_warning("clock", host, text, "set it, for example with chrony or systemd-timesyncd"))
    return found or f"within {SKEW_S:g} s of each other"


# ---------------------------------------------------------------------------------------------------------- what is there
def _pythons(seen: Sequence[Seen]) -> list[Finding] | str:
    found = []
    usable = _with_python(seen)
    for host in (host for host in seen if host not in usable):
        remedy = "set backend.python to a path that leads to the interpreter of the ranks on every host"
        found.append(_bad("python", host, host.facts["python"]["error"], remedy))
    expected = usable[0].facts["python"]["python"] if usable else ""
    for host in usable[1:]:
        given = host.facts["python"]["python"]
        if given != expected:
            near = given.split(".")[:2] == expected.split(".")[:2]
            text = (
                f"{host.facts['python']['executable']} is Python {given}, expected {expected} as on {usable[0].label}"
            )
            found.append((_warning if near else _bad)("python", host, text, SAME))
    return found or f"{expected}: {usable[0].facts['python']['executable']}"


def _with_python(seen: Sequence[Seen]) -> list[Seen]:
    return [host for host in seen if "error" not in host.facts["python"]]


def _mtrain(seen: Sequence[Seen]) -> list[Finding] | str:
    found = []
    usable = _with_python(seen)
    expected = next((host for host in usable if host.facts["python"]["code"]), None)
    for host in usable:
        python, code = host.facts["python"]["executable"], host.facts["python"]["code"]
        if code is None:
            text = f"{python} has no mtrain"
            found.append(_bad("mtrain", host, text, f"install it there with: {remedies.install('', python=python)}"))
        elif expected is not None and code["digest"] != expected.facts["python"]["code"]["digest"]:
            text = f"the source in {code['folder']} is not that of {expected.label} in {expected.facts['python']['code']['folder']}"
            found.append(
                _bad("mtrain", host, text, "install the same version, or check out the same commit, on every host")
            )
    if found or expected is None:
        return found
    return f"the same source on every host ({expected.facts['python']['code']['digest'][:12]})"


def _packages(seen: Sequence[Seen]) -> list[Finding] | str:
    found = []
    usable = _with_python(seen)
    if not usable:
        return ""
    expected = usable[0]
    for host in usable:
        for name, remedy in host.wanted["modules"].items():
            given, right = host.facts["python"]["modules"][name], expected.facts["python"]["modules"][name]
            if given is None:
                found.append(_bad("packages", host, f"{host.facts['python']['executable']} has no {name}", remedy))
            elif right is not None and given != right:
                text = f"{name} is of {given or 'unknown version'}, expected {right or 'unknown version'} as on {expected.label}"
                found.append(_bad("packages", host, text, SAME))
    for host in usable[1:]:
        given, right = host.facts["python"]["packages"], expected.facts["python"]["packages"]
        differing = [name for name in sorted(given.keys() | right.keys()) if given.get(name) != right.get(name)]
        if differing:
            told = ", ".join(
                f"{name} {given.get(name, 'none')} (expected {right.get(name, 'none')})" for name in differing
            )
            found.append(_warning("packages", host, f"differs from {expected.label}: {told}", SAME))
    modules = [text for text in expected.facts["python"]["modules"].values() if text]
    return (
        found or f"{', '.join(modules)} and {len(expected.facts['python']['packages'])} others, the same on every host"
    )


def _data(seen: Sequence[Seen]) -> list[Finding] | str:
    if any(host.facts["data"] is None for host in seen):
        return ""
    found = []
    for host in seen:
        data = host.facts["data"]
        if "error" in data:
            remedy = "copy the data there, mount the folder, or set data.root to where it is on every host"
            found.append(_bad("data", host, f"data.root {data['root']}: {data['error']}", remedy))
        elif not data["complete"]:
            text = f"data.root {data['root']} is too large or too slow to be compared in time"
            found.append(_warning("data", host, text, "make sure that it is the same on every host"))
    listed = [host for host in seen if host.facts["data"].get("complete")]
    for host in listed[1:]:
        expected, given = listed[0].facts["data"], host.facts["data"]
        if given["digests"] != expected["digests"]:
            text = (
                f"data.root {given['root']}: {host.first_difference or 'other files'} ({_counted(given)}; "
                f"{listed[0].label} has {_counted(expected)})"
            )
            found.append(_bad("data", host, text, "copy it anew, for example with rsync -a --delete"))
    return found or f"data.root is the same on every host: {_counted(listed[0].facts['data'])}"


def _counted(data: Mapping[str, Any]) -> str:
    some = "" if data["sized"] == data["files"] else f", sizes of {data['sized']:,} compared"
    return f"{data['files']:,} files, {data['bytes']:,} bytes{some}"


def _files(seen: Sequence[Seen]) -> list[Finding] | str:
    found = []
    for key in seen[0].facts["files"]:
        whole = [host for host in seen if "error" not in host.facts["files"][key]]
        for host in (host for host in seen if host not in whole):
            given = host.facts["files"][key]
            found.append(_bad("files", host, f"{key}: {given['path']}: {given['error']}", "copy it there"))
        for host in whole[1:]:
            given, expected = host.facts["files"][key], whole[0].facts["files"][key]
            if (given["bytes"], given["digest"]) != (expected["bytes"], expected["digest"]):
                text = f"{key}: {given['path']} is not the file that {whole[0].label} has ({given['bytes']:,} and "
                found.append(_bad("files", host, f"{text}{expected['bytes']:,} bytes)", "copy it anew"))
    names = ", ".join(seen[0].facts["files"])
    return found or (f"{names}: the same on every host" if names else "")


# ---------------------------------------------------------------------------------------------------- ports, disk, devices
def _ports(seen: Sequence[Seen]) -> list[Finding] | str:
    found, free = [], 0
    for host in seen:
        for port, key in host.wanted["ports"]:
            taken = host.facts["ports"][str(port)]
            free += not taken
            if taken:
                text = f"{key}: {port} is taken on {host.address}: {taken}"
                found.append(
                    _bad("ports", host, text, f"give another port, or `auto` for {key}, or end what listens there")
                )
    return found or (
        f"{free} ports that the spec fixes are free" if free else "the spec fixes none; free ones are taken"
    )


def _disk(seen: Sequence[Seen]) -> list[Finding] | str:
    found = []
    for host in seen:
        disk, room = host.facts["disk"], host.wanted["bytes"]
        if "error" in disk or not disk["writable"]:
            text = f"the run folder cannot be made: {disk['path']} {disk.get('error', 'is not writable')}"
            found.append(_bad("disk", host, text, "set report.dir to a folder that can be written on every host"))
        elif disk["free"] < room["least"]:
            text = f"{_size(disk['free'])} free at {disk['path']}, expected {_size(room['least'])} at the least"
            found.append(_bad("disk", host, text, "make room, or set report.dir to another disk"))
        elif disk["free"] < room["plenty"]:
            text = f"{_size(disk['free'])} free at {disk['path']}; checkpoints of a large model may need more"
            found.append(_warning("disk", host, text, "make room, or keep fewer: checkpoint.keep_last"))
    least = min(seen, key=lambda host: host.facts["disk"].get("free", 0))
    return found or f"{_size(least.facts['disk']['free'])} free or more"


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.0f} MiB"


def _devices(seen: Sequence[Seen]) -> list[Finding] | str:
    present = [host.facts["devices"]["present"] for host in seen]
    found = []
    for host, there in zip(seen, present, strict=True):
        needed, why = _needed(host.wanted, any_there=any(present))
        if there < needed:
            text = f"{there} GPUs are there, {needed} are asked for ({why})"
            found.append(_bad("devices", host, text, "correct that, or let ranks compute on the CPU: --devices cpu"))
        elif needed and host.facts["shm"].get("total", SHM_BYTES) < SHM_BYTES:
            text = f"/dev/shm holds {_size(host.facts['shm']['total'])}, NCCL may need {_size(SHM_BYTES)}"  # noqa: S108 - named only
            found.append(_warning("devices", host, text, "enlarge it, in a container with --shm-size=1g"))
    kinds = {tuple(sorted(set(host.facts["devices"]["models"]))) for host in seen}
    if found:
        return found
    if len(kinds) > 1:
        told = "; ".join(
            f"{host.label}: {', '.join(sorted(set(host.facts['devices']['models']))) or 'none'}" for host in seen
        )
        text = f"the GPUs are of different kinds ({told}): all will wait for the slowest"
        return [Finding(check="devices", state="warning", text=text)]
    return f"{min(present)} GPUs or more" if any(present) else "no GPUs: ranks compute on the CPU"


def _needed(wanted: Mapping[str, Any], *, any_there: bool) -> tuple[int, str]:
    """How many GPUs a host must have, and what says so."""
    if wanted["device"] == "cpu" or wanted["devices"] == []:
        return 0, ""
    if wanted["devices"] is not None:
        return max(wanted["devices"]) + 1, f"cluster.devices: {wanted['devices']}"
    if wanted["device"] == "cuda":
        return 1, "backend.options.device: cuda"
    return (int(wanted["slots"]), "one for each rank, as other hosts have") if any_there else (0, "")


CHECKS: Mapping[str, Callable[[Sequence[Seen]], list[Finding] | str]] = {
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
"""Each gives its findings, or a sentence where nothing is wrong; "" where there is nothing to look at."""
