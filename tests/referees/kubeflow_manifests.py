"""Manifests for Kubeflow Trainer against the schemas that it publishes, and the variables of its runtimes' pods as allocations.

Loaded by on_ranks.py; REFEREES/trainer is a checkout of github.com/kubeflow/trainer. The API server's strict mode is asked for:
a field that a schema does not have is an error. Variables are those that the plugins in `pkg/runtime/framework/plugins` set.
"""

import importlib
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import yaml

from mtrain.jobs.hosts.allocation import recognise

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "packages/mtrain-clusters/tests")]
manifests: Any = importlib.import_module("clusters.manifests")
jsonschema: Any = importlib.import_module("jsonschema")  # without types

TRAINER = Path(os.environ["REFEREES"]) / "trainer"
FIRST = "job-node-0-0.job"
PODS = [f"job-node-0-{index}.job" for index in range(3)]


def strict(schema: Any) -> Any:
    """A schema of a CRD in which unknown fields are errors."""
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(value) for key, value in schema.items() if key != "properties"}
    if "properties" in schema:
        made["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def validators() -> dict[str, Any]:
    """By kind."""
    found = {}
    for path in (TRAINER / "manifests/base/crds").glob("trainer*.yaml"):
        spec = yaml.safe_load(path.read_text())["spec"]
        (schema,) = (strict(each["schema"]["openAPIV3Schema"]) for each in spec["versions"] if each["storage"])
        schema["properties"]["metadata"] = {"type": "object"}
        found[spec["names"]["kind"]] = jsonschema.Draft202012Validator(schema)
    return found


def variables(policy: str, nodes: int, index: int) -> dict[str, str]:
    """The variables of a pod whose runtime has this policy; each is a pod of an indexed Job."""
    made = {
        "torch": {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": index, "PET_MASTER_ADDR": FIRST},
        "jax": {"JAX_NUM_PROCESSES": nodes, "JAX_PROCESS_ID": index, "JAX_COORDINATOR_ADDRESS": f"{FIRST}:29500"},
        "xgboost": {"DMLC_TRACKER_URI": FIRST, "DMLC_TASK_ID": index, "DMLC_NUM_WORKER": nodes},
        "mpi": {"OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile", "OMPI_MCA_orte_set_default_slots": 1},
    }[policy]
    given = {"PET_MASTER_PORT": 29500} if policy == "torch" else {}
    return {name: str(value) for name, value in {**made, **given, "JOB_COMPLETION_INDEX": index}.items()}


class Kubeflow(unittest.TestCase):
    """What Kubeflow Trainer would say of mtrain's manifests, and mtrain of its pods."""

    def test_what_is_submitted_fits_the_schemas(self) -> None:
        """With every backend and option, on one host and on three."""
        known, count = validators(), 0
        for backend, kind, name, hosts in manifests.every_case():
            given = manifests.options(**{**manifests.OPTIONS[name], "kind": kind})
            for document in manifests.documents(manifests.submission(backend=backend, hosts=hosts), given):
                if document["kind"] in known:
                    count += 1
                    assert [each.message for each in known[document["kind"]].iter_errors(document)] == []
        assert count > 100
        assert list(known["TrainJob"].iter_errors({"spec": {"trainer": {"numNodes": "three"}}}))
        assert list(known["TrainJob"].iter_errors({"spec": {"trainer": {"nodes": 3}}}))

    def test_their_runtimes_give_an_allocation(self) -> None:
        """Pods of torch are told by name, a single one trains, and no other pod of several trains alone."""
        files = sorted((TRAINER / "manifests/base/runtimes").rglob("*.yaml"))
        runtimes = [each for file in files for each in yaml.safe_load_all(file.read_text()) if "spec" in (each or {})]
        policies = {next(key for key in each["spec"]["mlPolicy"] if key != "numNodes") for each in runtimes}
        assert policies == {"torch", "jax", "xgboost", "mpi"}
        assert recognise(variables("torch", 1, 0)) is None
        for index in range(3):
            found = recognise(variables("torch", 3, index))
            assert found is not None
            assert (found.hosts, list(found.host_names), found.place, found.port) == (3, PODS, index, 29500)
            for policy in policies:
                assert recognise(variables(policy, 3, index)) is not None
