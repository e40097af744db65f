"""Updates that reporters look at: the state of the job before and after, as copies that cannot be written to."""

from collections.abc import Mapping

from mtrain.core.interfaces import Array, Progress
from mtrain.core.interfaces.reporter import InspectedUpdate
from mtrain.rank.spec.assembly import Assembly
from mtrain.records.reporter import Report


class Inspection:
    """Shows updates to the reporters of one rank. Every rank must make it, and call it as ``Hooks.inspect``.

    Without a reporter that inspects, nothing is gathered.
    """

    def __init__(self, job: Assembly, report: Report, *, total_updates: int) -> None:
        # The ranks agree once on when they gather their state, because gathering is collective: a reporter of one rank alone
        # needs the parts that the others hold.
        of_ranks = job.session.collective.all_gather(list(report.inspections))
        self._every = sorted({every for rank in of_ranks for every in rank})
        self._wanted_here = bool(report.inspections)
        self._job = job
        self._report = report
        self._total = total_updates
        self._before: Mapping[str, Array] | None = None

    def __call__(self, progress: Progress) -> None:
        """Show the update that has ended, if one is due, and keep the weights if the next one is."""
        inspected, following = self._before is not None, self._due(progress.update)
        if not inspected and not following:
            return
        state = self._job.session.state(self._job.model, self._job.optimizer)
        after = _lock(state.weights)
        if self._before is not None and self._wanted_here:
            self._report.inspect(
                InspectedUpdate(
                    update=progress.update - 1,
                    trained=[name for group in self._job.optimizer.groups for name in group],
                    before=self._before,
                    after=after,
                    average=_lock(state.ema),
                    moments=_lock(state.moments),
                )
            )
        # Kept only where the next update is due: it is a copy of all weights.
        self._before = after if following else None

    def _due(self, update: int) -> bool:
        return update < self._total and any(update % every == 0 for every in self._every)


def _lock(arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return views of the arrays that refuse to be written to."""
    views = {}
    for name, array in arrays.items():
        array.setflags(write=False)
        views[name] = array.view()
    return views
