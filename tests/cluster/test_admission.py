"""Which callers take part in a job, as a table: no socket, no process, no name is looked up."""

from dataclasses import replace
from typing import Any

import pytest

import mtrain
from mtrain.jobs.hosts.admission import Decision, Knowledge, Party, admit

HOSTS = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
SPEC = {"train": {"batch_size": 8}, "cluster": {"node_rank": None}}


def party(node: int, *, hosts: list[str] = HOSTS, secret: str = "", batch_size: int = 8, mode: str = "train") -> Party:
    values = {"train": {"batch_size": batch_size}, "cluster": {"node_rank": node}}
    return Party(
        hosts=hosts, node=node, port=1, mode=mode, values=values, line=lambda n: f"--node-rank {n}", secret=secret
    )


def hello(job: object, *, version: str = mtrain.__version__) -> dict[str, Any]:
    return {"event": "hello", "version": version, "host": "b", "job": job}


def decide(
    message: dict[str, Any], address: str = "10.0.0.2", *, called: bool = False, secret: str = "", **known: Any
) -> Decision:
    first = Knowledge(
        **{
            "party": party(0, secret=secret),
            "wanted": (1, 2),
            "taken": {0: "10.0.0.1"}.get,
            "has_address": lambda host, own: host == own,
            **known,
        }
    )
    return admit(first, message, address=address, called=called)


@pytest.mark.parametrize("secret", ["", "open sesame"])
def test_a_host_with_the_same_job_is_accepted_at_its_place(secret: str) -> None:
    assert decide(hello(party(1).job()), secret=secret) == Decision(accepted=1)
    assert decide(hello(party(2).job()), "10.0.0.3", secret=secret) == Decision(accepted=2)


def test_the_secret_stands_for_the_address() -> None:
    assert decide(hello(party(1).job()), "192.0.2.9", secret="open sesame") == Decision(accepted=1)
    stranger = decide(hello(party(1, batch_size=16).job()), "192.0.2.9")
    assert (stranger.accepted, stranger.ends_job) == (None, "")
    assert "does not take 192.0.2.9" in stranger.refusal
    assert "192.0.2.9" in stranger.note
    assert "batch_size" not in stranger.refusal + stranger.note


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (hello(party(1, batch_size=16).job()), "train.batch_size: it has 16, the first host 8"),
        (hello(party(1, mode="evaluate").job()), "the command: it has 'evaluate', the first host 'train'"),
        (hello(party(1, hosts=HOSTS[:2]).job()), "--ips: it has 10.0.0.1,10.0.0.2"),
        (hello(party(1).job(), version="0.0.0"), "it has mtrain 0.0.0"),
        (hello(party(2).job()), "--node-rank: it has 2, which 10.0.0.3 (c) has, too"),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_a_host_that_disagrees_is_told_why_and_ends_the_job_unless_it_has_begun(
    theirs: dict[str, Any], named: str, *, complete: bool
) -> None:
    address = HOSTS[theirs["job"]["node"]]
    decision = decide(theirs, address, taken={2: "10.0.0.3 (c)"}.get, complete=complete)
    assert named in decision.refusal
    assert decision.ends_job == ("" if complete else decision.refusal)
    assert decision.accepted is None


def test_a_second_first_host_ends_the_job_only_if_its_hosts_are_the_same() -> None:
    same = decide(hello(party(0, hosts=[HOSTS[1], HOSTS[0], HOSTS[2]]).job()))
    assert same.ends_job == same.refusal != ""
    other = decide(hello(party(0, hosts=[HOSTS[1], "10.0.0.9"]).job()))
    assert (bool(other.refusal), other.ends_job) == (True, "")
    assert "--node-rank: it has 0" in decide(hello(party(0).job()), "10.0.0.1").refusal


@pytest.mark.parametrize(
    ("message", "known"),
    [
        (hello(party(1).job()), {"wanted": (2,)}),
        (hello(party(1, batch_size=16).job()), {"parting": {1}}),
        (hello(7), {}),
        (hello({"node": True, "hosts": HOSTS, "spec": {}}), {}),
        (hello({"node": 1, "hosts": [1], "spec": {}}), {}),
        ({"do": "start"}, {}),
        ({"do": "bye", "text": "error: go home"}, {}),
    ],
    ids=["not wanted", "still ending", "no job", "no index", "no hosts", "an order", "a goodbye to a stranger"],
)
def test_others_are_cut_off_without_a_word(message: dict[str, Any], known: dict[str, Any]) -> None:
    assert decide(message, **known) == Decision()


def test_another_first_host_that_was_called_and_refuses_ends_the_job() -> None:
    text = "--ips: it has b,a\x1b[2J"
    decision = decide({"do": "bye", "refusal": text}, called=True)
    assert decision.ends_job.startswith("--ips: it has b,a")
    assert decision.ends_job.isprintable()


def test_a_host_that_wants_a_proof_is_named_once_and_for_all() -> None:
    decision = decide({"event": "proof", "nonce": "1"})
    assert "MTRAIN_CLUSTER_SECRET" in decision.note
    assert (decision.accepted, decision.refusal, decision.ends_job) == (None, "", "")


def test_a_key_that_one_side_alone_has_is_named_by_both() -> None:
    for key, side in (("train.extra", 1), ("train.less", 0)):
        theirs, ours = party(1), party(0)
        changed = (ours, theirs)[side]
        name = key.partition(".")[2]
        changed = replace(changed, values={**changed.values, "train": {**changed.values["train"], name: 3}})
        first, caller = (ours, changed) if side else (changed, theirs)
        decision = decide(hello(caller.job()), party=first)
        assert decision.accepted is None
        assert f"{key}: it has {3 if side else None}, the first host {None if side else 3}" in decision.refusal
