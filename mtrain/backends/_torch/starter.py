"""Start the ranks of one host as torchrun does. It takes the arguments of torchrun.

``python -m mtrain.backends._torch.starter --nnodes=2 ...`` does what ``python -m torch.distributed.run --nnodes=2 ...``
does, with a store that listens only at the address of the rendezvous. torchrun's own store would listen on every interface
of the machine and, having no password, answer anyone. The ranks of a job on one host are started without torchrun, and so
without importing torch (``one_host``).
"""

import sys

from mtrain.backends._torch import one_host


def main(argv: list[str]) -> int:
    """Start the ranks that the command line ``argv`` of torchrun describes; return the exit code."""
    if one_host.fits(argv):
        return one_host.run(argv)
    # Imported here because importing torch takes longer than everything else that happens before the ranks run.
    from torch.distributed import run

    from mtrain.backends._torch import internals
    from mtrain.backends._torch.store import listening_store

    internals.replace_static_rendezvous(listening_store)
    run.main(argv)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
