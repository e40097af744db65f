"""Format the report of the kit for people."""

from collections.abc import Iterator

from mtrain.spec.plugin_kinds import SINGULAR
from mtrain_kit.checks import Finding, Measure
from mtrain_kit.kit import Conformance
from mtrain_kit.plugin_kit import PluginConformance

MARKS = {"passed": "ok", "failed": "FAILED", "not run": "not run"}


def report(conformance: Conformance | PluginConformance) -> str:
    """Return a table of all checks, then the meaning of each failure and where to look, then the totals."""
    return "\n".join([_head(conformance), "", *_table(conformance), *_failures(conformance), "", _sum(conformance)])


def _head(conformance: Conformance | PluginConformance) -> str:
    if isinstance(conformance, PluginConformance):
        return f"{SINGULAR[conformance.kind]} {conformance.name} ({conformance.provider})"
    precision = {"fp64": "float64", "fp32": "float32 (it refuses float64)"}.get(conformance.precision, "")
    parts = [
        f"{conformance.ranks} ranks" if conformance.ranks > 1 else "1 rank",
        f"started by {conformance.launcher}",
        precision,
    ]
    compared = f"compared with solo on {conformance.framework}"
    return f"backend {conformance.backend} ({conformance.provider}): {', '.join(part for part in [*parts, compared] if part)}"


def _table(conformance: Conformance | PluginConformance) -> Iterator[str]:
    rows = [(finding.check.id, MARKS[finding.verdict], _show_measures(finding)) for finding in conformance.findings]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, mark, text in rows:
        yield f"  {name:<{widths[0]}}  {mark:<{widths[1]}}  {text}".rstrip()


def _show_measures(finding: Finding) -> str:
    worst = finding.worst
    if finding.reason:
        return finding.reason
    if finding.error:
        return finding.error.splitlines()[0][:160]
    return "nothing was measured" if worst is None else _show_comparison(worst)


def _show_comparison(measure: Measure) -> str:
    if measure.bound == 0 and measure.value == int(measure.value if measure.ok or measure.value < 1e9 else 0):
        return f"{measure.what}: {measure.value:.0f}"
    return f"{measure.what}: {measure.value:.2g} (bound {measure.bound:.2g})"


def _failures(conformance: Conformance | PluginConformance) -> Iterator[str]:
    for finding in conformance.findings:
        if finding.verdict != "failed":
            continue
        yield ""
        yield f"FAILED {finding.check.id}: {finding.check.claim}"
        if finding.error:
            yield f"  ended by  {finding.error}"
        for measure in finding.measures:
            if not measure.ok:
                where = f"; rank {measure.rank}: {measure.detail}" if measure.detail else f"; rank {measure.rank}"
                yield f"  measured  {_show_comparison(measure)}{where}"
        yield f"  means     {finding.check.means}"
        yield f"  look at   {finding.check.look}"


def _sum(conformance: Conformance | PluginConformance) -> str:
    counts = {word: sum(finding.verdict == word for finding in conformance.findings) for word in MARKS}
    totals = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    logs = "" if conformance.has_passed else f"; logs in {conformance.folder}"
    first = "; look at the first failure first: others may follow from it" if counts["failed"] > 1 else ""
    return f"{len(conformance.findings)} checks: {totals}, in {conformance.seconds:.0f} s{logs}{first}"
