"""Recognise a training job of Amazon SageMaker."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from mtrain.core.interfaces.allocation import Allocation, AllocationReader
from mtrain.launchers.allocations.variables import evidence


class SageMaker(AllocationReader):
    """Each container runs the command once, and is told the names of all, its own, and its network interface.

    ``SM_RESOURCE_CONFIG`` has all three; variables of their own count first.
    """

    distance: ClassVar[int] = 41

    def read(self, environ: Mapping[str, str]) -> Allocation | None:
        """Return the containers, if there are several."""
        # Older images set the one variable with all facts only.
        config = _parse_json(environ.get("SM_RESOURCE_CONFIG"), dict) or {}
        listed = _parse_json(environ.get("SM_HOSTS"), list)
        hosts = config.get("hosts") if listed is None else listed
        if not isinstance(hosts, list) or len(hosts) < 2 or not all(isinstance(host, str) for host in hosts):
            return None
        current = environ.get("SM_CURRENT_HOST") or config.get("current_host")
        interface = environ.get("SM_NETWORK_INTERFACE_NAME") or config.get("network_interface_name")
        place = hosts.index(current) if current in hosts else None

        def text_of(name: str) -> str:
            return evidence(environ, name) or evidence(environ, "SM_RESOURCE_CONFIG")

        return Allocation(
            scheduler="SageMaker",
            evidence=evidence(environ, "SM_HOSTS", "SM_CURRENT_HOST") or evidence(environ, "SM_RESOURCE_CONFIG"),
            hosts=len(hosts),
            host_names=hosts,
            processes=len(hosts),
            process=place,
            processes_per_host=1,
            place=place,
            interface=interface if isinstance(interface, str) else "",
            sources={
                "host_names": text_of("SM_HOSTS"),
                "place": text_of("SM_CURRENT_HOST"),
                "interface": text_of("SM_NETWORK_INTERFACE_NAME"),
            },
        )


def _parse_json(text: str | None, kind: type) -> Any:
    """Return the value of JSON ``text`` if it is of type ``kind``, else None."""
    try:
        value = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, kind) else None
