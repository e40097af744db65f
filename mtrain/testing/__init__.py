"""The conformance kit: proves that a backend trains as every other one does. ``mtrain plugins test NAME`` runs it.

::

    convnet.py network.py training.py   what is trained, in float64 where the backend has it
    finding.py                          checks, what they measure, and what became of them
    site.py                             where a check runs: one rank inside a backend
    collectives.py learning.py states.py leaving.py    the checks, a function each
    catalogue.py                        all checks: what each claims, what its failure means, where to look
    ranks.py diary.py                   what a rank runs; what it writes down meanwhile
    jobs.py kit.py                      starts jobs through the real launchers; judges what they have left
    words.py                            the report for people
    options.py test_conformance.py      the same under pytest: ``pytest --pyargs mtrain.testing --backend NAME``
"""
