"""PyTorch's own starter, with a store that listens at the address of the rendezvous alone; arguments are those of torchrun.

``python -m mtrain.backends._torch.starter --nnodes=1 ...`` is ``python -m torch.distributed.run --nnodes=1 ...``, whose store would
listen on every interface of the machine, and answer whoever connects to it: it has no password.
"""

import sys
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from mtrain.backends._torch.store import listening_store


class BoundRendezvous(static_tcp_rendezvous.StaticTCPRendezvous):
    """A static rendezvous that takes the store it finds, and makes none of its own."""

    def next_rendezvous(self) -> Any:
        """See the base class, which listens on every interface."""
        if self._store is None and self.rank == 0:
            self._store = listening_store(
                self.master_addr, self.master_port, size=self.world_size, timeout=self.timeout
            )
        return super().next_rendezvous()


def main(argv: list[str]) -> None:
    """Run torchrun. Seen with torch 2.13: ``create_rdzv_handler`` looks the class up in its module."""
    static_tcp_rendezvous.StaticTCPRendezvous = BoundRendezvous  # type: ignore[misc]
    run.main(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
