"""Which node of Ray is which host of the job."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mtrain.errors import UsageError
from mtrain_clusters._ray.placement import Placement

ADDRESSES = {"n1": "10.0.0.3", "n2": "10.0.0.1", "n3": "10.0.0.2"}
PLACES = {0: "n1", 1: "n2", 2: "n3"}
"""Bundle of the placement group -> node."""


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> Placement:
    """Three hosts on a Ray whose node ``n3`` runs this process."""
    module = ModuleType("ray.util.placement_group")
    module.placement_group_table = lambda group: {"bundles_to_node_id": PLACES}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.util", ModuleType("ray.util"))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", module)
    return Placement(ray=_ray("n3"), hosts=3, cpus=1.0, gpus=None, resources={}, note=lambda _: None)


def _ray(here: str, **more: Any) -> Any:
    gpus = {"n1": 0, "n2": 8, "n3": 4}
    nodes = [
        {"NodeID": name, "NodeManagerAddress": address, "Alive": True, "Resources": {"GPU": gpus[name]}}
        for name, address in {**ADDRESSES, **more}.items()
    ]
    return SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: here))


@pytest.mark.parametrize(("here", "expected"), [("n3", ["n3", "n2", "n1"]), ("n1", ["n1", "n2", "n3"])])
def test_the_first_host_is_this_node_and_the_others_follow_by_address(
    placement: Placement, here: str, expected: list[str]
) -> None:
    placement.ray = _ray(here)
    placement._order()
    assert [PLACES[bundle] for bundle in placement._bundles] == expected


def test_two_nodes_of_one_address_are_refused(placement: Placement) -> None:
    placement.ray = _ray("n3", n2="10.0.0.3")
    with pytest.raises(UsageError, match=r"10\.0\.0\.3.*--node-ip-address"):
        placement._order()


@pytest.mark.parametrize(
    ("hosts", "given", "expected"), [(1, None, 8), (2, None, 4), (3, None, 0), (4, None, 0), (3, 2, 2)]
)
def test_as_many_gpus_are_asked_for_as_each_of_the_best_nodes_has(
    placement: Placement, hosts: int, given: float | None, expected: float
) -> None:
    placement.hosts, placement.gpus = hosts, given
    assert placement._gpus() == expected
