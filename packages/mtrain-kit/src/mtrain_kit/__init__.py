"""The conformance kit: checks that a plugin keeps its promises. ``mtrain plugins test NAME`` runs it.

::

    convnet.py network.py training.py   what is trained, in float64 where the backend has it
    checks.py                           checks, their measures and their results
    check_context.py                    the context of a check: one rank inside a backend
    collectives.py learning.py states.py exchanges.py accuracy.py teardown.py    the checks, a function each
    catalogue.py                        all checks: the claim of each, the meaning of its failure, where to look
    ranks.py rank_records.py            the program of a rank; the records that it writes
    jobs.py kit.py                      start jobs through the real launchers; judge their records
    wording.py                          the report for people
    plugin_checks.py plugin_probe.py plugin_kit.py    models, data sets, tasks and launchers: the checks, a look from inside, jobs
    options.py test_conformance.py      the same under pytest: ``pytest --pyargs mtrain_kit --backend NAME``
"""

__version__ = "0.1.0"
