"""Start the ranks of one host as torchrun does. It takes the arguments of torchrun.

``python -m mtrain.backends._torch.ranks.starter --nnodes=2 ...`` does what ``python -m torch.distributed.run --nnodes=2 ...``
does, with a store that listens only at the address of the rendezvous. torchrun's own store would listen on every interface
of the machine and, having no password, answer anyone.

torchrun imports torch before it starts the first rank, and each rank then imports it again; here the ranks are copies of a
process that has imported it (``forked``), or processes that import it by themselves. On several hosts torchrun's agents meet
to number the ranks, which ``--first-rank`` and ``--world-size`` say here. Rank 0 hosts the store at which the ranks meet
(``group.join``). A user's script may join torch's process group by itself, so for one on one host this process hosts the
store, as torchrun does. On several hosts, and where its ranks cannot be copies, torchrun starts them.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta

from mtrain.backends._torch import forked
from mtrain.system.rank_starter import Ranks, runs_script

FAILURE_GRACE_S = 30.0
"""Seconds that the other ranks have to end when one has failed, or when this process's parent is gone."""
STORE_TIMEOUT = timedelta(minutes=15)
"""How long a request to the store of a script's ranks may take, as under torchrun."""


def main(argv: list[str]) -> int:
    """Start the ranks that the command line ``argv`` of torchrun describes; return the exit code."""
    options = alone(argv)
    status = None if options is None else _run(options)
    if status is not None:
        return status
    # Imported here because importing torch takes longer than everything else that happens before the ranks run.
    from torch.distributed import run

    from mtrain.backends._torch import internals
    from mtrain.backends._torch.ranks.store import listening_store

    internals.replace_static_rendezvous(listening_store)
    run.main(argv)
    return 0


def alone(argv: Sequence[str]) -> argparse.Namespace | None:
    """Return the options of a command line that numbers the ranks of this host; None: only torchrun knows what to do for it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--nproc-per-node", type=int, required=True)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", required=True)
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--log-dir")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    try:
        options, unknown = parser.parse_known_args(list(argv))
    except (argparse.ArgumentError, SystemExit):
        return None
    is_known = not unknown and options.command and not options.command[0].startswith("-")
    if options.nnodes == 1:
        options.world_size = options.nproc_per_node
    return options if is_known and options.world_size and options.max_restarts == 0 else None


def _run(options: argparse.Namespace) -> int | None:
    """Start the ranks and wait for them; return 0 if all have ended with 0, otherwise 1; None: only torchrun can start them.

    SIGTERM and SIGINT to this process are passed on to the ranks. Who has sent it decides how long they may take.
    """
    ranks = Ranks(failure_grace_s=FAILURE_GRACE_S, request_grace_s=float("inf"))
    is_script = runs_script(options.command)
    name, *words = options.command
    with ranks.handling_signals():
        pays = options.module and (is_script or options.nproc_per_node > 1 or "torch" in sys.modules)
        program = forked.program(name, words) if pays else None
        if program is None and is_script and not ranks.end_requested:
            return None
        with _host_store(options) if is_script else nullcontext(None) as host:
            for local_rank in range(options.nproc_per_node):
                rank = options.first_rank + local_rank
                variables = _variables(local_rank, options, has_store=host is not None)
                if program is None:
                    module = ["-m"] if options.module else []
                    ranks.start(rank, [sys.executable, "-u", *module, *options.command], variables)
                else:
                    ranks.add(rank, forked.start(program, words, variables))
            if host is not None:
                host()
            return 1 if ranks.wait() else 0


@contextmanager
def _host_store(options: argparse.Namespace) -> Iterator[Callable[[], None] | None]:
    """Bind the address at which a script's ranks meet; yield a function that begins to host their store there.

    It has to be called after the ranks were copied, because the store has a thread. None: it is no address of this machine.
    """
    from mtrain.backends._torch.ranks import store

    listener = store.bound(options.master_addr, int(options.master_port))
    if listener is None:
        yield None
        return
    hosted: list[object] = []
    os.register_at_fork(after_in_child=listener.close)
    with listener:
        yield lambda: hosted.append(store.store_on(listener, size=options.nproc_per_node, timeout=STORE_TIMEOUT))
    hosted.clear()


def _variables(local_rank: int, options: argparse.Namespace, *, has_store: bool) -> Mapping[str, str]:
    """Return the variables that torchrun would add to the environment of a rank; ``has_store``: this process hosts it."""
    return {
        **dict.fromkeys(("RANK", "ROLE_RANK"), str(options.first_rank + local_rank)),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), str(options.world_size)),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "GROUP_RANK": str(options.node_rank),
        "GROUP_WORLD_SIZE": str(options.nnodes),
        "ROLE_NAME": "default",
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": str(has_store),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
