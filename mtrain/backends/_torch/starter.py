"""torchrun, with a store that listens only at the address of the rendezvous. It takes the arguments of torchrun.

``python -m mtrain.backends._torch.starter --nnodes=1 ...`` does what ``python -m torch.distributed.run --nnodes=1 ...``
does. torchrun's own store would listen on every interface of the machine and, having no password, answer anyone.
"""

import sys

from torch.distributed import run

from mtrain.backends._torch import internals
from mtrain.backends._torch.store import listening_store


def main(argv: list[str]) -> None:
    """Run torchrun with the command line ``argv``."""
    internals.replace_static_rendezvous(listening_store)
    run.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
