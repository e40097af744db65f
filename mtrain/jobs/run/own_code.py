"""The user's own code that a job runs, found from the spec without running it."""

from mtrain.spec import references
from mtrain.spec.config import Loaded
from mtrain.spec.references import Reference


def own_code_of(loaded: Loaded, *, framework: str) -> dict[str, Reference]:
    """Return the user's own code that the job runs, its script aside, by the words for it.

    Raises:
        SpecError: the job's task refuses the spec, or a class does not take the options of the spec.
        PluginError: a name does not exist.
    """
    spec, job, found = loaded.spec, loaded.job, dict[str, Reference]()
    if spec.task and not loaded.script:
        if references.is_reference(spec.model.name) or references.is_reference(spec.data.format):
            job.check_kinds(job.registry.task_of("datasets", spec.data.format))
        task = job.task_named(spec.task)
        task.refuse(spec, framework=framework)
        found = {key: references.parse(text) for key, text in task.own_code(spec).items()}
    for name, options in spec.report.reporters.items():
        if options is False or not references.is_reference(name):
            continue
        from mtrain.tasks.own.reporter import refuse_unknown  # numpy comes with it, which other plans need not import

        reference = references.parse(name)
        refuse_unknown(reference, {} if options is True else options, path=f"report.reporters.{name}")
        found[f"reporter {reference.name}"] = reference
    return found
