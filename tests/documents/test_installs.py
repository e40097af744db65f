"""Nothing is looked up on a package index under a name of mtrain's: nobody owns these names there.

So whatever installs mtrain gives the folder or the wheel of `mtrain-trace` besides its own. A package of mtrain's is installed from its
folder where mtrain is there already, or in the same command; a plugin of somebody's, which requires mtrain, without what it requires.
"""

import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest

from mtrain.spec import packages, remedies
from tests.distribution.base_environment import base_requirements, required, tops

ROOT = Path(__file__).parents[2]
INSTALL = re.compile(r"\b(?:pip3?|uv pip|pipx|uv tool) (?:install|download|wheel)\b((?:\\\n|[^`\n;&])*)")
WORD = re.compile(r"'[^']*'|\"[^\"]*\"|[^\s'\"]+")
NAME = re.compile(r"mtrain(?:[-_.]\w+)*(?:\[[^\]]*\])?(?:[ =<>!~].*)?", re.IGNORECASE)
WHEEL = re.compile(r"\.whl(?:\[[^\]]*\])?$")
OWN = re.compile(r"\.(?:\[[^\]]*\])?|.*/mtrain(?:\[[^\]]*\])?|(?:.*/)?mtrain-[^/]*\.whl(?:\[[^\]]*\])?")
PACKAGE = re.compile(rf"(?:.*/)?packages/(?:{'|'.join(packages.PACKAGES)})(?:\[[^\]]*\])?")
PLUGIN = re.compile(r"(?:.*/)?mtrain-(?!trace$)[\w-]+")
EXTRAS = re.compile(
    r"(?P<project>\.|.*/mtrain|(?:.*/)?packages/mtrain-[\w-]+|(?:.*/)?mtrain[\w]*-[^/]*\.whl)\[(?P<extras>[^\]]*)\]"
)
"""What installs extras of mtrain's or of a package's."""
TRACE = re.compile(r"(?:.*/)?packages/mtrain-trace|(?:.*/)?mtrain_trace-[^/]*\.whl")
BARE = re.compile(r"(?<!extra = \")(?<!extra=\")(?<!install\([\"'])(?<![/\w-])mtrain(?:[-_]\w+)*\[[a-z]")
"""`mtrain[ddp]` is a requirement that an index would be asked for, wherever it stands but where `remedies` makes a command of it."""


def problems(text: str) -> Iterator[str]:
    """Yield what an index would be asked for by the commands of a text."""
    for found in INSTALL.finditer(text):
        words = [
            word.strip("'\"").rstrip(",.:)\\") or "."
            for word in WORD.findall(found[1].partition(" #")[0])
            if word != "\\"
        ]
        paths = [word for before, word in zip(["", *words], words, strict=False) if before in ("-e", "--editable")]
        if names := [word for word in words if word not in paths and NAME.fullmatch(word) and not WHEEL.search(word)]:
            yield f"{found[0]}: {names[0]} is a name, and no path"
        elif "--no-deps" in words:
            continue
        elif any(PLUGIN.fullmatch(word) and not WHEEL.search(word) and not PACKAGE.fullmatch(word) for word in words):
            yield f"{found[0]}: a plugin requires mtrain: --no-deps"
        elif any(map(OWN.fullmatch, words)) and not any(map(TRACE.fullmatch, words)):
            yield f"{found[0]}: without packages/mtrain-trace"
        for word in words:
            yield from (f"{found[0]}: there is no extra {extra}" for extra in unknown_extras(word))
    yield from (f"{found[0]}: an index would be asked for it" for found in BARE.finditer(text))


@cache
def extras_of(name: str) -> set[str]:
    """Return the extras of mtrain or of a package, as its sources say."""
    folder = ROOT if name == "mtrain" else ROOT / "packages" / name
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project.get("optional-dependencies", {}))


def unknown_extras(word: str) -> set[str]:
    """Return the extras that a word of a command asks for, and that the project does not have; pip only warns of them."""
    if not (found := EXTRAS.fullmatch(word)):
        return set()
    name = re.split(r"-\d", found["project"].rpartition("/")[2])[0].replace("_", "-")
    extras = set(found["extras"].split(",")) if re.fullmatch(r"[\w,-]+", found["extras"]) else set()  # '...', ${extras}
    return extras - extras_of("mtrain" if name == "." else name)


def sources() -> list[Path]:
    """Return the files that people and programs take commands from: the checkout but its tests and lists of requirements."""
    folders = ("mtrain", "packages", "docs", "examples", "benchmarks", "scripts", "docker", ".github", ".ci")
    files = [*ROOT.glob("*"), *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    generated = {"__pycache__", "runs", "build"}
    endings = (".png", ".svg", ".npz", ".gif", ".ico", ".pyc")
    return [
        file
        for file in files
        if file.is_file() and file.suffix not in endings and file.name != "pyproject.toml"
        if not any(part in generated or part.endswith(".egg-info") for part in file.parts)
        if file.relative_to(ROOT).parts[::2][:2] != ("packages", "tests")
    ]


def test_no_page_message_or_script_asks_an_index_for_mtrain() -> None:
    texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in sources()}
    wrong = [f"{file.relative_to(ROOT)}: {each}" for file, text in texts.items() for each in problems(text)]
    assert not wrong, "\n".join(wrong)
    read = {file.relative_to(ROOT).as_posix() for file, text in texts.items() if INSTALL.search(text)}
    assert {
        "README.md",
        "docs/quick-start.md",
        "docker/cpu.Dockerfile",
        "scripts/install",
        "examples/README.md",
    } <= read


@pytest.mark.parametrize(
    "text",
    [
        "pip install mtrain",
        "`pip install 'mtrain[ddp]'`",
        "python -m pip install --no-deps mtrain-trace",
        "pip install mtrain_trace==0.1.0 numpy",
        "pip download 'mtrain >= 0.1'",
        "pipx install mtrain",
        "pip install -e .",
        "pip install -e '.[ddp,vision]'.",
        "RUN pip install -c constraints.txt \\\n    '.[all]' && true",
        "/py -m pip install -e '/opt/mtrain[ddp]'",
        "pip install 'dist/mtrain-0.1.0-py3-none-any.whl[ddp]'",
        "pip install ./examples/mtrain-sharded",
        "it needs mtrain[onnx] only",
        "pip install mtrain-ui",
        "pip install 'mtrain-ui[wandb]'",
        "pip install -e . -e packages/mtrain-ui",
        "pip install -e packages/mtrain-trace -e '.[ui]'",
        "pip install -e 'packages/mtrain-ui[mlfow]'",
        "pip install dist/mtrain_trace-0.1.0-py3-none-any.whl 'dist/mtrain-0.1.0-py3-none-any.whl[sweep]'",
        "pip install ./packages/mtrain-squares",
    ],
)
def test_a_command_that_would_ask_an_index_is_noticed(text: str) -> None:
    assert list(problems(text))


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e packages/mtrain-trace -e '.[ddp]'",
        "pip install -e packages/mtrain-trace",
        "RUN pip install -c constraints.txt \\\n    ./packages/mtrain-trace '.[all]' && pip list",
        "pip install dist/mtrain_trace-0.1.0-py3-none-any.whl 'dist/mtrain-0.1.0-py3-none-any.whl[ddp]'",
        "pip install --no-deps --no-build-isolation -e mtrain-squares",
        "pip install torch; mtrain doctor",
        "pip install -e packages/mtrain-ui",
        "pip install -e 'packages/mtrain-ui[mlflow,wandb]'",
        "pip install -e packages/mtrain-trace -e '.[ddp]' -e packages/mtrain-sweep",
        "/py -m pip install -e /opt/mtrain/packages/mtrain-deploy",
    ],
)
def test_a_command_that_gives_paths_is_none_of_these(text: str) -> None:
    assert not list(problems(text))


def test_no_remedy_asks_an_index_for_mtrain(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = [*extras_of("mtrain"), *packages.PACKAGES]
    extras += [f"{package}[{extra}]" for package in packages.PACKAGES for extra in extras_of(package)]
    extras += ["ddp,vision,mtrain-ui", "report,mtrain-ui[wandb]"]
    for _ in range(2):
        assert not [text for extra in extras for text in problems(remedies.install(extra))]
        monkeypatch.setattr(remedies, "checkout", lambda: None)


class Index:
    """A package index that has nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Refusing(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path.strip("/"))
                self.send_error(404)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def index() -> Iterator[Index]:
    made = Index()
    yield made
    made.close()


def make_environment(folder: Path, extra: list[str]) -> Path:
    """Return an interpreter with what mtrain requires, and without mtrain and its packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    others = [name for name in base_requirements() if not name.startswith("mtrain")]
    for name in required([*others, *extra]) | set(extra):
        for top, installed in tops(metadata.distribution(name)).items():
            if not (site / top).exists():
                (site / top).symlink_to(installed)
    return folder / "bin" / "python"


def clone(folder: Path) -> Path:
    """Return a copy of the files that git has or would have."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "mtrain", "packages", ":(glob)*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.mark.job
def test_a_clone_is_installed_without_asking_an_index_for_a_name_of_mtrain(tmp_path: Path, index: Index) -> None:
    needs = ["setuptools", "jinja2", "markupsafe", "matplotlib", "h11", "starlette", "uvicorn"]  # of mtrain-ui
    python, here = make_environment(tmp_path / "venv", needs), clone(tmp_path / "clone")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    settings = {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index.address, "PIP_RETRIES": "0"}

    def install(*words: str) -> subprocess.CompletedProcess[str]:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-build-isolation"]
        return subprocess.run([*pip, *words], cwd=here, env=settings, capture_output=True, text=True, check=False)

    alone = install("-e", ".")
    assert alone.returncode != 0
    assert index.asked == ["mtrain-trace"], "this is how an index is asked, and that it would be noticed"
    index.asked.clear()
    both = install("-e", "packages/mtrain-trace", "-e", ".[report]")
    assert (both.returncode, index.asked) == (0, []), both.stderr
    package = install("-e", "packages/mtrain-ui")
    assert (package.returncode, index.asked) == (0, []), package.stderr
    code = "import mtrain, mtrain_trace, mtrain_ui; print(mtrain.__file__, mtrain_trace.__file__, mtrain_ui.__file__)"
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=kept, capture_output=True, text=True, check=True)
    assert all(Path(place).is_relative_to(here) for place in done.stdout.split())
    for program in (("mtrain", "ui"), ("mtrain-trace",)):
        line = [python.with_name(program[0]), *program[1:], "--help"]
        done = subprocess.run(line, cwd=tmp_path, env=kept, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
