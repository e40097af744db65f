"""The page of errors and exit codes, with messages that the program has just given."""

import ast
import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mtrain import errors
from mtrain.errors import UsageError

INTRODUCTION = """# Errors and exit codes

| exit code | meaning |
|--:|---|
| 0 | done |
| 1 | the job has failed; the last lines say which rank, why, and where its log is |
| 2 | bad input, or something is missing: nothing was started |
| 130, 143 | ended by Ctrl-C, or by SIGTERM, with the state saved |

A message says what was given, what was expected and what to do. All mistakes of a spec are listed at once. A job that fails prints the
traceback of the rank that failed first; the whole logs are in `logs/` of the run folder.

## Common messages

Commands that cannot work, and what they answer:

"""
COMMANDS = (
    ("an unknown spec", ("-c", "yolo5n")),
    ("an unknown key", ("-c", "digits", "-o", "train.batchsize=8")),
    ("a value of another type", ("-c", "digits", "-o", "optimizer.learning_rate=fast")),
    ("a batch that does not divide among the ranks", ("-c", "digits", "--nproc-per-node", "3")),
    ("an unknown backend", ("-c", "digits", "--backend", "dpp")),
    ("data that is not there", ("-c", "yolov5n")),
    ("a run without a checkpoint", ("-c", "digits", "--resume", "runs/none")),
    ("an image that is not there", ("predict", "a.jpg")),
    ("a run that is not there", ("evaluate", "runs/best")),
)
"""What is wrong, and the arguments of `mtrain`, typed in an empty folder."""
CLASSES_HEAD = """
## Exceptions

From Python these are raised, all of them classes of `mtrain.errors`; on the command line mtrain ends with their exit code.

| exception | exit code | meaning |
|---|--:|---|"""


def page() -> str:
    """Return the Markdown of the page."""
    return "\n".join([INTRODUCTION + "\n".join(_messages()), CLASSES_HEAD, *_classes()]) + "\n"


def _messages() -> Iterator[str]:
    """Yield a heading and a block for each command: the line that is typed, and the answer."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for what, arguments in COMMANDS:
                text = answer(arguments).replace(f" (in {Path.cwd()})", "")
                yield f"**{what[0].upper()}{what[1:]}**\n\n```console\n$ mtrain {' '.join(arguments)}\n{text}\n```\n"
        finally:
            os.chdir(before)


def answer(arguments: tuple[str, ...]) -> str:
    """Return what `mtrain` prints for a command line that it refuses.

    Raises:
        ValueError: The command was not refused with exit code 2.
    """
    from mtrain.commands import main

    with io.StringIO() as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(arguments)
        text = said.getvalue().strip()
    if code != UsageError.exit_code:
        raise ValueError(f"mtrain {' '.join(arguments)}: ended with {code}, expected {UsageError.exit_code}: {text}")
    return text


def _classes() -> Iterator[str]:
    """Yield a row for each class of `mtrain/errors.py`, in the order of its tree."""
    for node in ast.parse(Path(errors.__file__).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            text = (ast.get_docstring(node) or "").split("\n\n")[0].replace("``", "`")
            yield f"| `{node.name}` | {getattr(errors, node.name).exit_code} | {' '.join(text.split())} |"
