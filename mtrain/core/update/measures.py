"""Measure one update: times, and the metrics of its micro batches."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class Measures:
    """Times in seconds, and metrics by name, during one update of one rank."""

    summed: bool
    """See ``loop.Job.sums_metrics``."""
    start_s: float = 0.0
    data_wait_s: float = 0.0
    _values: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, name: str, value: Any, *, weight: float, is_further: bool = False) -> None:
        """Add a number or a tensor of a micro batch, without waiting for the device.

        ``is_further``: it is a further part of the last one of this name, such as the second of two losses.
        """
        value = value.detach() if hasattr(value, "detach") else value
        value = value if weight == 1 else value * weight
        values = self._values.setdefault(name, [])
        if is_further and values:
            values[-1] = values[-1] + value
        else:
            values.append(value)

    def divide(self, name: str, divisor: float) -> None:
        """Divide all values of a metric so far."""
        self._values[name] = [value / divisor for value in self._values[name]]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the metrics, in the order in which they are sent."""
        return tuple(self._values if self.summed else sorted(self._values))

    def on_device(self, passes: int) -> list[Any]:
        """Return the mean of each metric over the ``passes`` of an update, still on the device."""
        return [sum(self._values[name]) / passes for name in self.names]

    def read(self, passes: int) -> list[float]:
        """Return the mean of each metric; waits for the device.

        What is not summed is averaged in float64 over as many values as there are, so that one rank with two micro batches
        reports what two ranks report.
        """
        if self.summed:
            return [float(sum(self._values[name])) / passes for name in self.names]
        return [sum(map(float, self._values[name])) / len(self._values[name]) for name in self.names]
