"""Two reporters: a class that lists slow updates in a file, and a function that prints the best evaluations."""

from statistics import median


class Slow:
    """Writes a line into `slow-RANK.txt` for each update that takes `factor` times as long as usual."""

    every_rank = True

    def __init__(self, run, factor: float = 2.0) -> None:
        self.file = (run.folder / f"slow-{run.rank}.txt").open("a", buffering=1)
        self.factor, self.seconds = factor, []

    def update(self, record) -> None:
        """Compare the seconds of an update with the median of those before."""
        if self.seconds and record["update_seconds"] > self.factor * median(self.seconds):
            self.file.write(f"update {record['update']}: {record['update_seconds']:.2f} s\n")
        self.seconds.append(record["update_seconds"])

    def end(self, record) -> None:
        """Write how the job ended."""
        self.file.write(f"{record['reason']} after {record['updates']} updates\n")


def best(record) -> None:
    """Print a line for each evaluation that is the best so far."""
    if record["kind"] == "evaluation" and record["best"]:
        print(f"epoch {record['epoch']}: {record['metrics']['score']:.3f}", flush=True)
