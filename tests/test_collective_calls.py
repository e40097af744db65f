"""No collective call depends on the number of the rank: every rank makes the same calls in the same order."""

import ast
from collections.abc import Iterator

import pytest

from tests.sources import nodes, source_files

FOLDERS = ("core/", "rank/", "tasks/", "models/", "mtrain_deploy/", "mtrain_language/", "mtrain_tensorflow/")
"""Backends are left out: they implement the collectives. So is the conformance kit, which plants faults."""
FILES = {name: file for name, file in source_files().items() if name.startswith(FOLDERS)}
METHODS = {"all_reduce", "all_gather", "prepare", "state", "restore", "step", "backward", "averaged"}
"""Methods of ``Collective``, ``RankSession`` and ``Optimizer`` that every rank must call."""
FUNCTIONS = {"broadcast", "barrier", "differing"}
"""Functions of ``core.collective`` that every rank must call."""
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def compares_rank(condition: ast.expr) -> bool:
    """Return whether a condition compares the number of a rank."""
    return any(
        isinstance(node, ast.Compare)
        and any(
            (isinstance(part, ast.Attribute) and part.attr == "rank")
            or (isinstance(part, ast.Name) and part.id == "rank")
            for part in (node.left, *node.comparators)
        )
        for node in ast.walk(condition)
    )


def guarded(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the code that some ranks run and others do not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp) and compares_rank(node.test):
            yield from (node.body, node.orelse)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            for position, statement in enumerate(block if isinstance(block, list) else ()):
                if isinstance(statement, ast.If) and compares_rank(statement.test):
                    yield from (*statement.body, *statement.orelse)
                    if isinstance(statement.body[-1], LEAVES):  # the rest is for the other ranks alone
                        yield from block[position + 1 :]


def collective_calls(tree: ast.AST) -> list[str]:
    """Return the collective calls, as ``line: method``, that some ranks make and others do not."""
    functions = [call.func for part in guarded(tree) for call in ast.walk(part) if isinstance(call, ast.Call)]
    methods = [
        f"{function.lineno}: {function.attr}"
        for function in functions
        if isinstance(function, ast.Attribute) and function.attr in METHODS | FUNCTIONS
    ]
    return methods + [
        f"{function.lineno}: {function.id}"
        for function in functions
        if isinstance(function, ast.Name) and function.id in FUNCTIONS
    ]


def test_no_collective_call_depends_on_the_rank():
    guilty = [f"{name}:{call}" for name, file in FILES.items() for call in collective_calls(nodes(file)[0])]
    assert len(FILES) > 100
    assert guilty == []


@pytest.mark.parametrize(
    "code",
    [
        "if c.rank == 0:\n    c.all_reduce(x, 'sum')",
        "if rank != 0:\n    pass\nelse:\n    session.state(model, optimizer)",
        "def f():\n    if c.rank != 0:\n        return\n    c.all_gather(1)",
        "x = c.all_gather(1) if c.rank == 0 else None",
        "if c.rank == 0:\n    barrier(c)",
    ],
)
def test_a_collective_call_of_one_rank_is_noticed(code):
    assert len(collective_calls(ast.parse(code))) == 1
