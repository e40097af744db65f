"""horovodrun for one host, with a rendezvous on the loopback interface only. It takes the arguments of horovodrun.

``python -m mtrain.backends._horovod.single_host_starter -np 2 ...`` does what ``python -m horovod.runner.launch -np 2
...`` does. horovodrun's own rendezvous would listen on every interface of the machine and, having no password, answer
anyone.
"""

import sys

from horovod.runner import launch

from mtrain.backends._horovod import internals


def main() -> None:
    """Run horovodrun."""
    internals.listen_on_loopback_only()
    internals.leave_checks_to_ranks()
    try:
        launch.run_commandline()
    except RuntimeError as error:
        # A rank has failed, and horovodrun has printed which. Where horovodrun ended is nothing that helps a person.
        sys.exit(str(error))


if __name__ == "__main__":
    main()
