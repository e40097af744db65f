"""Verbs of any distribution: listed without being imported, loaded when they are used; nobody replaces one of mtrain."""

import json
import os
import sys
import sysconfig
import tomllib
from importlib import import_module, metadata
from importlib.machinery import PathFinder
from pathlib import Path
from shlex import quote

import pytest

import mtrain
from mtrain.commands import main, verbs
from mtrain.errors import PluginError
from mtrain.spec import packages, plugins, remedies
from tests.sources import PACKAGES, ROOT, source_files

VERB = "import click\n@click.command()\ndef {name}():\n    click.echo('{words}')\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "FOLDER", tmp_path / "cache")
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    yield site
    for name in [name for name in sys.modules if name.startswith("verbs_of_")]:
        del sys.modules[name]


def distribution(
    site: Path, owner: str, name: str = "hello", *, policy: str = "", words: str = "hi", code: str = ""
) -> None:
    package = site / f"verbs_of_{owner}"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text("")
    (package / "verb.py").write_text(code or VERB.format(name=name, words=words))
    if policy:
        (package / "plugins.toml").write_text(policy)
    info = site / f"{owner}_pack-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {owner}-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[mtrain.commands]\n{name} = verbs_of_{owner}.verb:{name}\n")
    verbs._read_installed.cache_clear()


def test_a_verb_of_others_stands_below_its_heading_and_is_imported_when_it_runs(here, capsys):
    distribution(here, "ada", policy='[commands.hello]\nheading = "Inspect"\nsummary = "Greet somebody."\n')
    assert main(["--help"]) == 0
    section = capsys.readouterr().out.partition("Inspect:")[2].partition("\n\n")[0]
    assert "  hello       Greet somebody." in section
    assert not any(name.startswith("verbs_of_") for name in sys.modules)
    assert main(["hello"]) == 0
    assert capsys.readouterr().out == "hi\n"


@pytest.mark.parametrize("policy", ["", "[commands", "commands = 5", "[commands]\nhello = 5", "[commands.other]\n"])
def test_a_verb_that_nothing_describes_stands_below_other(here, policy, capsys):
    distribution(here, "bob", policy=policy)
    assert main(["--help"]) == 0
    assert "  hello" in capsys.readouterr().out.partition("\nOther:\n")[2]


def test_what_a_stranger_writes_moves_no_cursor(here, capsys):
    distribution(here, "eve", policy='[commands.hello]\nheading = "\\u001b[2J"\nsummary = "a\\u001b]0;b"\n')
    assert main(["--help"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_nobody_replaces_a_verb_of_mtrain(here, capsys):
    distribution(here, "mallory", "train", words="mine now", policy='[commands.train]\nsummary = "Better."\n')
    assert verbs.find_verbs()["train"].target == "mtrain.commands.train:train"
    assert main(["--help"]) == 0
    assert "Better." not in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert "mine now" not in capsys.readouterr().out


def test_nobody_replaces_a_verb_below_a_verb_of_mtrain(here, capsys):
    for name in ("plugins.list", "plugins.show"):
        (here / name).mkdir()
        distribution(here / name, f"mallory_{name[-4:]}", name, code=VERB.format(name="hello", words="mine now"))
        sys.path.insert(0, str(here / name))
    verbs._read_installed.cache_clear()
    assert main(["plugins", "--help"]) == 0
    assert capsys.readouterr().out.count("  list") == 1
    assert main(["plugins", "list"]) == 0
    assert "mine now" not in capsys.readouterr().out


def test_a_verb_of_a_package_has_rivals_as_any_other(here, capsys):
    distribution(here, "rival", "export", code=VERB.format(name="export", words="mine now"))
    assert main(["export", "runs/x"]) == 2
    said = capsys.readouterr()
    assert "the command 'export' is provided by mtrain-deploy 0.1.0, rival-pack 1.0; uninstall all but one" in said.err
    assert said.out == ""


def test_of_two_distributions_with_one_verb_neither_runs_until_one_is_pinned(here, tmp_path, capsys):
    for owner in ("ada", "bob"):
        distribution(here, owner, words=owner)
    assert main(["hello"]) == 2
    assert (
        "the command 'hello' is provided by ada-pack 1.0, bob-pack 1.0; uninstall all but one"
        in capsys.readouterr().err
    )
    (tmp_path / "plugins.toml").write_text('[commands.hello]\ndistribution = "bob-pack"\n')
    assert main(["hello"]) == 0
    assert capsys.readouterr().out == "bob\n"
    (tmp_path / "plugins.toml").write_text('[commands]\ndisabled = ["hello"]\n')
    assert main(["hello"]) == 2
    assert "is disabled by plugins.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "said"),
    [("import no_such_module", "cannot be imported: ModuleNotFoundError"), ("hello = 5", "is int, expected a command")],
)
def test_a_broken_verb_is_one_sentence(here, code, said, capsys):
    distribution(here, "carol", code=code)
    assert main(["hello"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_change_is_seen_though_the_list_is_kept(here, capsys):
    distribution(here, "ada", policy='[commands.hello]\nsummary = "Old."\n')
    assert verbs.find_verbs()["hello"].line == "Old."
    (file,) = verbs.FOLDER.iterdir()
    read = json.loads(file.read_text())
    policy = here / "verbs_of_ada" / "plugins.toml"
    policy.write_text('[commands.hello]\nsummary = "New."\n')
    os.utime(policy, ns=(1, 1))
    verbs._read_installed.cache_clear()
    assert verbs.find_verbs()["hello"].line == "New."
    (here / "another-1.0.dist-info").mkdir()
    verbs._read_installed.cache_clear()
    verbs.find_verbs()
    assert json.loads(file.read_text())["folders"] != read["folders"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"folders": 5}', b"\xff", b"[" * 100_000])
def test_a_damaged_list_is_made_again(here, content):
    distribution(here, "ada")
    expected = verbs.find_verbs()
    (file,) = verbs.FOLDER.iterdir()
    file.write_bytes(content)
    verbs._read_installed.cache_clear()
    assert verbs.find_verbs() == expected
    assert json.loads(file.read_text())["verbs"]


def test_a_home_that_takes_no_files_does_no_harm(here, monkeypatch):
    (here / "file").write_text("")
    monkeypatch.setattr(verbs, "FOLDER", here / "file" / "verbs")
    distribution(here, "ada")
    assert "hello" in verbs.find_verbs()


def test_a_verb_that_an_older_installation_does_not_list_asks_for_a_new_one(here, monkeypatch, capsys):
    monkeypatch.setattr(verbs, "_read_installed", lambda path: {})
    assert main(["evaluate"]) == 2
    assert "install again" in capsys.readouterr().err


def points_file(folder: Path, info: str, text: str) -> None:
    (folder / info).mkdir(parents=True)
    (folder / info / "entry_points.txt").write_text(text)


def test_the_entry_points_of_this_environment_are_those_that_python_finds():
    found = set(verbs._entry_points(sys.path))
    assert found == {(point.name, point.value) for point in metadata.entry_points(group="mtrain.commands")}
    assert ("train", "mtrain.commands.train:train") in found


def test_files_of_entry_points_are_read_as_python_reads_them(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    points_file(
        first,
        "Some.Pack-1.0.dist-info",
        "[console_scripts]\na = x:y\n\n[mtrain.commands]\n# b = no:no\nc=pack.c:verb\nd = pack.d:verb [fast]\n\n[mtrain.models]\ne = x:y\n",
    )
    points_file(first, "developed.egg-info", "[mtrain.commands]\nf = developed:verb")
    points_file(first, "without-2.0.dist-info", "")
    (first / "none-1.0.dist-info").mkdir()
    points_file(second, "some_pack-2.0.dist-info", "[mtrain.commands]\ng = pack.g:verb\n")  # the first one is imported
    points_file(second, "other-1.dist-info", "[mtrain.commands]\nh = other:verb\n")
    monkeypatch.setattr(sys, "path", [str(first), str(tmp_path / "missing"), str(second)])
    found = list(verbs._entry_points(sys.path))
    assert sorted(found) == [("c", "pack.c:verb"), ("d", "pack.d:verb"), ("f", "developed:verb"), ("h", "other:verb")]
    theirs = metadata.entry_points(group="mtrain.commands")
    assert sorted(found) == sorted((point.name, f"{point.module}:{point.attr}") for point in theirs)


@pytest.mark.parametrize(
    "text",
    [
        *(file.read_text() for name, file in source_files(endings=(".toml",)).items() if name.endswith("plugins.toml")),
        '[models.a]\nsummary = "x"\n  [ "commands" . hello ]\nsummary = "y"\n[commands."plugins.new"]\nheading = "z"\n',
        'commands.hello.summary = "above every section"\n[models]\n',
        'commands = {hello = {summary = "in one line"}}\n',
        '[models.a]\nsummary = """\n[commands.hello]\nsummary = 5\n"""\n',
        "[commands.hello]\nsummary = Q\n[no section]\nQ\n".replace("Q", 3 * chr(39)),
        '[commands.hello]\nlibraries = [\n["a"],\n["b"],\n]\nsummary = "y"\n',
        '[commandsandmore.hello]\nsummary = "x"\n',
        "",
    ],
)
def test_what_describes_verbs_is_what_the_whole_file_says(text, tmp_path):
    (tmp_path / "plugins.toml").write_text(text)
    assert verbs._read_descriptions(tmp_path / "plugins.toml") == tomllib.loads(text).get("commands", {})


def test_a_package_that_a_hook_finds_is_described_too(here, monkeypatch):
    distribution(here, "hooked", policy='[commands.hello]\nsummary = "Found by a hook."\n')
    hidden = here.parent / "hidden"
    hidden.mkdir()
    (here / "verbs_of_hooked").rename(hidden / "verbs_of_hooked")

    class Hook:
        @staticmethod
        def find_spec(name, path=None, target=None):
            return PathFinder.find_spec(name, [str(hidden)]) if name == "verbs_of_hooked" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    assert verbs.find_verbs()["hello"].line == "Found by a hook."


OF_PACKAGES = [
    (package, name) for package, each in packages.PACKAGES.items() for name in each.brings.get("commands", ())
]


@pytest.mark.parametrize(("package", "verb"), OF_PACKAGES)
def test_a_verb_of_another_version_is_refused_before_it_is_imported(package, verb, monkeypatch, capsys):
    module = verbs._read_installed(tuple(sys.path))[verb].target.partition(":")[0]
    monkeypatch.setattr(import_module(package.replace("-", "_")), "__version__", "0.0.9")
    monkeypatch.setitem(sys.modules, module, None)  # importing it would fail, as what another release has changed would
    assert main(verb.split(".")) == 2
    error = capsys.readouterr().err
    assert f"{package} has version 0.0.9, mtrain {mtrain.__version__}; they are released together" in error
    assert error.count("\n") == 1


def test_plugins_and_python_names_of_another_version_are_refused_too(monkeypatch):
    monkeypatch.setattr(import_module("mtrain_clusters"), "__version__", "0.0.9")
    monkeypatch.setattr(import_module("mtrain_deploy"), "__version__", "0.0.9")
    with pytest.raises(PluginError, match=r"mtrain-clusters has version 0\.0\.9"):
        plugins.load("clusters", "slurm")
    with pytest.raises(PluginError, match=r"mtrain-deploy has version 0\.0\.9"):
        _ = mtrain.export


def test_a_package_of_another_version_is_replaced_by_its_wheel_where_there_is_no_clone(monkeypatch):
    monkeypatch.setattr(remedies, "checkout", lambda: None)
    words = packages.other_version("mtrain-ui", "0.0.9")
    assert words is not None
    assert words.endswith("pip install WHEEL-OF-MTRAIN-UI")


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A search path with all libraries and, of mtrain's distributions, only mtrain and mtrain-trace."""
    site = tmp_path_factory.mktemp("site")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(tuple(packages.MODULES)):
            (site / path.name).symlink_to(path)
    hidden = {sysconfig.get_path("purelib"), *(str(PACKAGES[module].parent) for module in packages.MODULES)}
    return [*(entry for entry in sys.path if entry not in hidden), str(site)]


@pytest.mark.parametrize("is_clone", [True, False])
def test_a_verb_that_is_not_installed_names_its_package_and_the_command(
    core_alone, is_clone, monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verbs, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(sys, "path", core_alone)
    if not is_clone:
        monkeypatch.setattr(remedies, "checkout", lambda: None)
    for package, verb in OF_PACKAGES:
        place = f"-e {quote(f'{ROOT}/packages/{package}')}" if is_clone else f"WHEEL-OF-{package.upper()}"
        words = f"{verb.replace('.', ' ')} is a command of {package}, which is not installed: pip install {place}"
        for further in ((), ("--help",), ("-c", "digits")):
            assert main([*verb.split("."), *further]) == 2
            assert capsys.readouterr() == ("", f"error: {words}\n")
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert {package for package, verb in OF_PACKAGES if f"Not installed: {package}." in shown} == {
        package for package, verb in OF_PACKAGES if "." not in verb
    }
    assert main(["plugins", "--help"]) == 0
    assert "Not installed: mtrain-kit." in capsys.readouterr().out


def test_a_verb_that_mtrain_does_not_describe_is_of_an_older_installation(here):
    """Its list of entry points may lie beside the sources, where building has left it."""
    info = here / "mtrain_of_before-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mtrain-of-before\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text(
        "[mtrain.commands]\nformer = mtrain.cli.former:former\nexport = mtrain.cli.export:export\n"
    )
    verbs._read_installed.cache_clear()
    found = verbs.find_verbs()
    assert "former" not in found
    assert found["export"].target.startswith("mtrain_deploy.")
