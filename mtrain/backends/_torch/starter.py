"""torchrun, with a store that listens only at the address of the rendezvous. It takes the arguments of torchrun.

``python -m mtrain.backends._torch.starter --nnodes=1 ...`` does what ``python -m torch.distributed.run --nnodes=1 ...``
does. torchrun's own store would listen on every interface of the machine and, having no password, answer anyone.
"""

import sys
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from mtrain.backends._torch.store import listening_store


class BoundRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """A static rendezvous whose store listens at the rendezvous address only."""

    def next_rendezvous(self) -> Any:
        """Make the store before the base class does, which would listen on every interface."""
        if self._store is None and self.rank == 0:
            self._store = listening_store(
                self.master_addr, self.master_port, size=self.world_size, timeout=self.timeout
            )
        return super().next_rendezvous()


def main(argv: list[str]) -> None:
    """Run torchrun with the command line ``argv``."""
    # torch 2.13's `create_rdzv_handler` looks the class up in its module when it is called, so replacing it there
    # suffices.
    static_tcp_rendezvous.StaticTCPRendezvous = BoundRendezvous  # type: ignore[misc]
    run.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
