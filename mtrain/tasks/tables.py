"""Tables that describe the data set of any task."""

from collections.abc import Mapping

from mtrain.core.interfaces import Table


def class_table(counts: Mapping[str, Mapping[str, int]], *, unit: str) -> Table:
    """Tabulate how often each class occurs in each split, ``counts[split][class]``, with a bar for the first split."""
    first = next(iter(counts.values()))
    largest = max([*first.values(), 1])
    rows = [
        (str(label), name, *(str(split[name]) for split in counts.values()), "█" * round(30 * first[name] / largest))
        for label, name in enumerate(first)
    ]
    return Table(columns=("label", "class", *(f"{split} {unit}" for split in counts), ""), rows=rows)
