"""The user's own code that a job runs, found from the spec without running it."""

from collections.abc import Mapping

from mtrain.spec import references
from mtrain.spec.config import Loaded
from mtrain.spec.model import Spec
from mtrain.spec.references import Reference
from mtrain.spec.resolved import Resolved


def own_code_of(loaded: Loaded, *, framework: str) -> dict[str, Reference]:
    """Return the user's own code that the job runs, its script aside, by the words for it.

    Raises:
        SpecError: the job's task refuses the spec, or a class does not take the options of the spec.
        PluginError: a name does not exist.
    """
    of_task = {} if loaded.script else _own_code(loaded.job, framework)
    return of_task | _own_reporters(loaded.spec)


def _own_reporters(spec: Spec) -> dict[str, Reference]:
    found = {}
    for name, options in spec.report.reporters.items():
        if options is False or not references.is_reference(name):
            continue
        from mtrain.tasks.own.reporter import refuse_unknown  # numpy comes with it, which other plans need not import

        reference = references.parse(name)
        refuse_unknown(reference, {} if options is True else options, path=f"report.reporters.{name}")
        found[f"reporter {reference.name}"] = reference
    return found


def _own_code(job: Resolved, framework: str) -> dict[str, Reference]:
    """Return the user's own code that the job runs, by the key of the spec that names it, without running it.

    Raises:
        SpecError: the job's task refuses the spec, or a name does not exist.
    """
    spec = job.spec
    if not spec.task:
        return {}
    if references.is_reference(spec.model.name) or references.is_reference(spec.data.format):
        job.check_kinds(job.registry.task_of("datasets", spec.data.format))
    task = job.task_named(spec.task)
    task.refuse(spec, framework=framework)
    return {key: references.parse(text) for key, text in task.own_code(spec).items()}


def files_of(loaded: Loaded, own_code: Mapping[str, Reference]) -> dict[str, str]:
    """Return the files of the user's own code, which must be equal on all hosts: what each is -> path."""
    script = {} if loaded.script is None else {"the script": str(loaded.script.path)}
    return script | {key: str(reference.file) for key, reference in own_code.items() if reference.file is not None}
