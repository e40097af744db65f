"""The report of the kit for people."""

from collections.abc import Iterator

from mtrain.testing.checks import Finding, Measure
from mtrain.testing.kit import Conformance

MARKS = {"passed": "ok", "failed": "FAILED", "not run": "not run"}


def report(found: Conformance) -> str:
    """A table of all checks, then what each failure means and where to look, then the sum."""
    return "\n".join([_head(found), "", *_table(found), *_failures(found), "", _sum(found)])


def _head(found: Conformance) -> str:
    precision = {"fp64": "float64", "fp32": "float32 (it refuses float64)"}.get(found.precision, "")
    parts = [f"{found.ranks} ranks" if found.ranks > 1 else "1 rank", f"started by {found.launcher}", precision]
    compared = f"compared with solo on {found.framework}"
    return f"backend {found.backend} ({found.provider}): {', '.join(part for part in [*parts, compared] if part)}"


def _table(found: Conformance) -> Iterator[str]:
    rows = [(finding.check.id, MARKS[finding.verdict], _measured(finding)) for finding in found.findings]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, mark, text in rows:
        yield f"  {name:<{widths[0]}}  {mark:<{widths[1]}}  {text}".rstrip()


def _measured(finding: Finding) -> str:
    worst = finding.worst
    if finding.reason:
        return finding.reason
    if finding.error:
        return finding.error.splitlines()[0][:160]
    return "nothing was measured" if worst is None else _compared(worst)


def _compared(measure: Measure) -> str:
    if measure.bound == 0 and measure.value == int(measure.value if measure.ok or measure.value < 1e9 else 0):
        return f"{measure.what}: {measure.value:.0f}"
    return f"{measure.what}: {measure.value:.2g} (bound {measure.bound:.2g})"


def _failures(found: Conformance) -> Iterator[str]:
    for finding in found.findings:
        if finding.verdict != "failed":
            continue
        yield ""
        yield f"FAILED {finding.check.id}: {finding.check.claim}"
        if finding.error:
            yield f"  ended by  {finding.error}"
        for measure in finding.measures:
            if not measure.ok:
                where = f"; rank {measure.rank}: {measure.detail}" if measure.detail else f"; rank {measure.rank}"
                yield f"  measured  {_compared(measure)}{where}"
        yield f"  means     {finding.check.means}"
        yield f"  look at   {finding.check.look}"


def _sum(found: Conformance) -> str:
    counts = {word: sum(finding.verdict == word for finding in found.findings) for word in MARKS}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    logs = "" if found.passed else f"; logs in {found.folder}"
    first = "; look at the first failure first: others may follow from it" if counts["failed"] > 1 else ""
    return f"{len(found.findings)} checks: {told}, in {found.seconds:.0f} s{logs}{first}"
