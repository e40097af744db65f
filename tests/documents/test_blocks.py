"""Blocks of code in the documents: specs validate, Python compiles, commands exist with these flags and keys.

A block that cannot be checked says why in a comment before it: `<!-- not checked: REASON -->`.
"""

import ast
import importlib
import inspect
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from mtrain.commands import front
from mtrain.commands.options import load_job
from mtrain.errors import MtrainError
from mtrain.spec import config
from mtrain.spec.model import Spec
from mtrain_clusters.commands.submit import with_queue_flags
from mtrain_trace import command as trace_command
from scripts.site import documents
from scripts.site.documents import Block

ROOT = documents.ROOT
BLOCKS = [block for page in documents.documents() for block in documents.blocks(page)]
LANGUAGES = {"", "console", "diff", "mermaid", "python", "toml", "yaml"}
SYSTEM = {
    *(
        "cd",
        "cp",
        "curl",
        "docker",
        "export",
        "fabric",
        "git",
        "gunicorn",
        "hf",
        "kubectl",
        "mkdir",
        "openssl",
        "pre-commit",
        "pytest",
        "ray",
        "sbatch",
        "scancel",
        "sinfo",
    ),
    *("source", "squeue", "srun", "ssh", "sudo", "torchrun", "uvicorn"),
}
"""Programs that are not mtrain's, and whose arguments are not checked."""
SHELL = {">", ">>", "2>", "&", "&&", "|", ";"}
"""Words of the shell that end a command."""
STAND_INS = {"runs/cells/spec.yml": "_BASE_: ppyoloe_s_bccd\n"}
"""Content of a reader's own spec that a command names; of others, such as `my.yml`, `_BASE_: yolov5s`."""


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and block.not_checked is None]


def test_blocks_have_a_language_that_is_checked_and_reasons_where_not() -> None:
    assert {block.language for block in BLOCKS} <= LANGUAGES
    bare = [str(block) for block in of("") if re.search(r"^(mtrain|make|pip) [a-z-]", block.text, re.MULTILINE)]
    assert not bare, "commands are in blocks of the language console, after a $"
    assert all(len(block.not_checked) > 10 for block in BLOCKS if block.not_checked is not None)


# Python


def check_all(places: Iterable[tuple[object, Callable[[], object]]]) -> None:
    """Run every check and fail with one list of all that failed, each with its place in the documents."""
    problems, count = [], 0
    for place, check in places:
        count += 1
        try:
            check()
        except (Exception, pytest.fail.Exception) as error:
            problems.append(f"{place}: {type(error).__name__}: {error}")
    assert count, "nothing was checked"
    assert not problems, "\n".join(problems)


def test_a_failed_check_is_named_with_its_place_and_the_others_go_on() -> None:
    def fail() -> None:
        raise click.UsageError("no such flag")

    with pytest.raises(AssertionError, match=r"a\.md:1: UsageError: no such flag\n *c\.md:3"):
        check_all([("a.md:1", fail), ("b.md:2", int), ("c.md:3", lambda: pytest.fail("wrong"))])
    with pytest.raises(AssertionError, match="nothing"):
        check_all([])


def test_python_compiles_and_uses_names_and_arguments_that_mtrain_has() -> None:
    check_all(
        (block, lambda block=block: check_names(ast.parse(textwrap.dedent(block.text)))) for block in of("python")
    )


def test_python_in_sentences_uses_names_and_arguments_that_mtrain_has() -> None:
    check_all((page.relative_to(ROOT), lambda page=page: check_sentences(page)) for page in documents.documents())


def check_sentences(page: Path) -> None:
    """Check the calls of mtrain's functions that the sentences of a page quote."""

    def look(part: str) -> str:
        for code in re.findall(r"`([^`]*\b(?:mtrain|session)\.\w+\([^`]*)`", part):
            try:
                check_names(ast.parse(code.rstrip(":") if not code.startswith("with ") else f"{code} pass"))
            except SyntaxError:
                continue  # a command, a path, or a part of a line
        return part

    documents.prose(page.read_text(encoding="utf-8"), look)


def check_names(tree: ast.AST) -> None:
    """Check what a piece of Python uses of mtrain, and of the `session` of a script."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mtrain":
            for alias in node.names:
                assert found(f"{node.module}.{alias.name}") is not None
        elif isinstance(node, ast.Attribute) and (name := dotted(node)) is not None:
            assert found(name) is not None, name
        elif isinstance(node, ast.Call) and (name := dotted(node.func)) is not None:
            taken = inspect.signature(found(name)).parameters
            free = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert free or given <= set(taken), f"{name}: {given - set(taken)}"


def dotted(node: ast.expr) -> str | None:
    """`mtrain.a.b` of an expression that names something of mtrain; None for others."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    root = {"mtrain": "mtrain", "session": "mtrain.Session"}.get(node.id if isinstance(node, ast.Name) else "")
    if root == "mtrain.Session":
        names = names[-1:]  # what an attribute has is the attribute's
    return ".".join([root, *reversed(names)]) if root and names else None


def found(name: str) -> Any:
    """The object that a dotted name means; None if there is none."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value
    return None


# YAML and TOML


def test_toml_parses() -> None:
    check_all((block, lambda block=block: tomllib.loads(block.text)) for block in of("toml"))


def test_specs_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with a reader's own model or data refers to files, which are those of `examples/own-model`."""

    def check(number: int, block: Block) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        check_block(block, folder)

    check_all((block, lambda place=place: check(*place)) for place in enumerate(of("yaml")) for block in place[1:])


def check_block(block: Block, tmp_path: Path) -> None:
    """Load a block of YAML as a spec, laid over a shipped one where it is a fragment; ``tmp_path`` is the current folder."""
    contents = list(yaml.safe_load_all(block.text))
    if all("apiVersion" in content for content in contents):
        return  # manifests of Kubernetes
    (values,) = contents
    assert isinstance(values, dict), "give it a section, or mark it"
    for name in re.findall(r"\./([\w/]+\.py):", block.text):
        (tmp_path / name).write_text(own_code(block.text, name), encoding="utf-8")
    base = {} if "_BASE_" in values or is_own(values) else {"_BASE_": base_of(values)}
    config.load(base | values, environ={})


def is_own(values: Mapping[str, Any]) -> bool:
    return ":" in str(values.get("model", {}).get("name", ""))


def base_of(values: Mapping[str, Any]) -> str:
    """The shipped spec over which a fragment is laid: one of its task."""
    known = config.load({"_BASE_": "digits"}, environ={}).values
    sections = set(Spec.model_fields) | set(known)
    assert set(values) <= sections, f"no section of a spec: {set(values) - sections}; mark the block if it is no spec"
    classifies = values.get("data", {}).get("format") in ("csv_labels", "image_folder")
    return "resnet18_folder" if classifies else "yolov5s"


def own_code(text: str, name: str) -> str:
    """A file with the classes and functions that a spec names in it, which take any options."""
    names = set(re.findall(rf"\./{re.escape(name)}:(\w+)", text))
    return "".join(f"class {each}:\n    def __init__(self, **options): ...\n\n" for each in sorted(names))


# Commands


def commands(block: Block) -> Iterator[tuple[int, list[str]]]:
    """Yield the command lines of a block, which begin with `$`, as words, with the line's number."""
    text = re.sub(r"\\\n", lambda _: " \x00", block.text)
    number = block.line
    for line in text.split("\n"):
        if line.lstrip().startswith("$ "):
            words = shlex.split(line.lstrip()[2:].replace("\x00", ""), comments=True)
            yield number, words[: next((place for place, word in enumerate(words) if word in SHELL), len(words))]
        number += 1 + line.count("\x00")


LINES = [
    (f"{block.page.relative_to(ROOT)}:{number}", words)
    for block in of("", "console")
    for number, words in commands(block)
]


def test_a_command_over_two_lines_is_one() -> None:
    block = Block(ROOT / "README.md", 5, "console", "$ a b \\\n    c  # why\nout\n  $ d 'e f'\n", None)
    assert list(commands(block)) == [(5, ["a", "b", "c"]), (8, ["d", "e f"])]


def test_comments_stand_above_their_commands() -> None:
    """Beside them they are out of sight on the site, whose blocks have 80 columns."""
    lines = [
        f"{block.page.relative_to(ROOT)}: {line}"
        for block in of("console")
        if block.page.is_relative_to(ROOT / "docs")
        for line in block.text.splitlines()
        if re.match(r" *\$ .*\S +# ", line)
    ]
    assert not lines


def test_commands_exist_and_take_these_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(number: int, words: list[str]) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(click.Path, "convert", lambda _self, value, _parameter, _context: value)
            check_command(words)

    check_all(
        (place, lambda number=number, words=words: check(number, words)) for number, (place, words) in enumerate(LINES)
    )


def check_command(words: list[str]) -> None:
    """Check that the program of a command line is known, and what of mtrain it uses."""
    words = list(words)
    while re.match(r"^[A-Z_]+=", words[0]):
        words.pop(0)
    check = CHECKS.get(Path(words[0]).name)
    if check is not None:
        check(words[1:])
    else:
        known = Path(words[0]).name in SYSTEM or (ROOT / words[0]).is_file()
        assert known, f"{words[0]}: no known program, no file; mark the block"
        if "mtrain" in words and words[0] in SYSTEM:
            check_mtrain(words[words.index("mtrain") + 1 :])


def check_mtrain(words: list[str]) -> None:
    """Parse a command line as `mtrain` does, and read the spec that it describes."""
    context = front.make_context("mtrain", list(words))
    group: click.Command = front
    while isinstance(group, click.Group):
        name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert command is not None, name
        context = command.make_context(name, list(rest), parent=context)
        group = command
    if "overrides" in context.params:
        check_spec(with_queue_flags(context.params) if group.name == "submit" else context.params)


def check_trace(words: list[str]) -> None:
    """Parse a command line as `mtrain-trace` does."""
    trace_command.parser().parse_args(words[: words.index("--")] if "--" in words else words)


def check_spec(params: Mapping[str, Any]) -> None:
    """Read the spec that flags and overrides describe; a reader's own spec stands on a shipped one."""
    name = params.get("config")
    if name and name not in config.shipped_names():
        assert name.endswith((".yml", ".yaml")) or name.isupper(), f"-c {name}: no shipped spec"
        Path("mine.yml").write_text(STAND_INS.get(name, "_BASE_: yolov5s\n"), encoding="utf-8")
        params = {**params, "config": "mine.yml"}
    try:
        load_job(params)
    except MtrainError as error:
        pytest.fail(str(error))


def test_commands_in_sentences_exist_and_have_these_flags() -> None:
    """In a sentence a command may be a part of one: `mtrain plugins test NAME --ranks`."""
    unknown: list[str] = []
    for page in documents.documents():

        def look(part: str, page: Path = page) -> str:
            for code in re.findall(r"`(mtrain [^`]+)`", part):
                unknown.extend(f"{page.name}: {code}: {word}" for word in unknown_words(code.split()[1:]))
            return part

        if page.name != "CHANGELOG.md":
            documents.prose(page.read_text(encoding="utf-8"), look)
    assert not unknown


def unknown_words(words: list[str]) -> list[str]:
    """Words of a part of a command line that name neither a command nor a flag of it."""
    if not words[0].startswith("-") and words[0] not in front.list_commands(click.Context(front)):
        return words[:1]
    context = click.Context(front)
    command: click.Command = front
    rest = words if not words[0].startswith("-") or words[0] in ("--version", "--help") else ["train", *words]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        inner = command.get_command(context, rest[0])
        if inner is None:
            return rest[:1] if rest[0].islower() and "|" not in rest[0] else []
        command, rest = inner, rest[1:]
    own = rest[: rest.index("--")] if "--" in rest else rest
    flags = {
        flag.replace("_", "-") for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)
    }
    if command.name == "run":  # what follows the script is the script's
        own = own[: next((place for place, word in enumerate(own) if word.endswith(".py")), len(own))]
    typed = {word.partition("=")[0].replace("_", "-") for word in own if re.match(r"--?[a-z]", word)}
    return sorted(typed - flags - {"--help", "-h"})


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {word for word in words if "=" not in word} <= set(targets)


def check_python(words: list[str]) -> None:
    if words[0] == "-m":
        words = words[1:]
        assert words[0] in ("pip", "http.server") or importlib.util.find_spec(words[0]) is not None
        if words[0] == "mtrain":
            check_mtrain(words[1:])
    elif words[0].endswith(".py") and "/" in words[0]:
        assert (ROOT / words[0]).is_file(), words[0]


def check_pip(words: list[str]) -> None:
    for word in words:
        for folder, extras in re.findall(r"(^\.|packages/mtrain-\w+|mtrain[\w.-]*)\[([\w,-]+)\]", word):
            file = ROOT / (folder if folder.startswith("packages/") else "") / "pyproject.toml"
            known = tomllib.loads(file.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
            assert set(extras.split(",")) <= set(known)


CHECKS: Mapping[str, Callable[[list[str]], None]] = {
    "mtrain-trace": check_trace,
    "mtrain": check_mtrain,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
}
