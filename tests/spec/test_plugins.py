"""Plugins are listed without being imported, loaded by name, and governed by plugins.toml."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtrain.errors import PluginError, SpecError
from mtrain.spec import config, plugins
from mtrain.spec.registry import Registry

MODULE = """
from pydantic import BaseModel, ConfigDict

class Mine:
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        timeout_s: int = 5
        retries: int = 0
    framework = "none"
    nn = ops = check = before_script = takes_meshes = None
    rendezvous = "none"

class Bare:
    pass
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; sys.path and the modules of the test are put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("outside_plugin")]:
        del sys.modules[name]


def distribution(folder: Path, name: str, points: str) -> None:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def policy(folder: Path, text: str) -> plugins.Policy:
    (folder / "plugins.toml").write_text(text)
    return plugins.read_policy(folder / "plugins.toml")


@pytest.mark.smoke
@pytest.mark.job
def test_names_lists_what_ships_and_imports_none_of_it():
    code = (
        "import sys; from mtrain.spec import plugins\n"
        "found = {kind: [entry.name for entry in plugins.names(kind)] for kind in plugins.KINDS}\n"
        "assert {'solo', 'ddp'} <= set(found['backends']), found\n"
        "assert {'coco', 'voc', 'yolo', 'digits'} <= set(found['datasets'])\n"
        "heavy = ('torch', 'paddle', 'mtrain.backends', 'mtrain.models')\n"
        "bad = [name for name in sys.modules if name.startswith(heavy)]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_answered_with_the_known_and_the_closest(here):
    with pytest.raises(PluginError, match=r"no backend 'dpp' \(known: .*solo.*\); did you mean 'ddp'\?"):
        plugins.load("backends", "dpp")


def test_a_local_plugin_loads_from_beside_its_policy_without_packaging(here):
    sub = here / "sub"
    sub.mkdir()
    (sub / "outside_plugin_a.py").write_text(MODULE)
    rules = policy(sub, '[backends.mine]\nmodule = "outside_plugin_a:Mine"\noptions = { timeout_s = 60 }\n')
    assert plugins.load("backends", "mine", policy=rules).__name__ == "Mine"
    made = Registry(rules).options("backends", "mine", {"retries": 2}, path="backend.options")
    assert made.model_dump() == {"timeout_s": 60, "retries": 2}


def test_wrong_options_are_named_with_their_path(here):
    (here / "outside_plugin_b.py").write_text(MODULE)
    rules = policy(here, '[backends.mine]\nmodule = "outside_plugin_b:Mine"\n')
    with pytest.raises(SpecError) as caught:
        Registry(rules).options("backends", "mine", {"timeouts": 1, "retries": "x"}, path="backend.options")
    assert set(caught.value.problems) == {
        "backend.options.timeouts: unknown key; did you mean 'timeout_s'?",
        "backend.options.retries: given 'x', expected an integer",
    }


def test_default_options_lie_below_the_spec_and_are_told_as_origin(here):
    (here / "outside_plugin_c.py").write_text(MODULE)
    (here / "plugins.toml").write_text(
        '[backends.mine]\nmodule = "outside_plugin_c:Mine"\noptions = { timeout_s = 60, retries = 1 }\n'
    )
    (here / "a.yml").write_text("backend: {name: mine, options: {retries: 3}}\n")
    loaded = config.load("a.yml", environ={})
    assert loaded.spec.backend.options == {"retries": 3, "timeout_s": 60}
    assert str(loaded.origin("backend.options.timeout_s")) == "plugins.toml [backends.mine]"
    assert loaded.spec.plugins == str(here / "plugins.toml")


def test_two_distributions_of_one_name_are_refused_by_name_until_one_is_pinned(here):
    for name in ("first", "second"):
        (here / f"outside_plugin_of_{name}.py").write_text(MODULE)
        distribution(here, f"{name}-pack", f"[mtrain.backends]\ntwice = outside_plugin_of_{name}:Mine\n")
    sys.path.insert(0, str(here))
    with pytest.raises(PluginError, match=r"provided by \S+-pack 1.0, \S+-pack 1.0; uninstall all but one, or pin"):
        plugins.load("backends", "twice")
    rules = policy(here, '[backends.twice]\ndistribution = "second-pack"\n')
    assert plugins.find("backends", "twice", policy=rules).provider == plugins.Provider("second-pack", "1.0")
    assert plugins.load("backends", "twice", policy=rules).__module__ == "outside_plugin_of_second"


def test_an_older_list_of_a_distribution_further_back_on_the_path_does_not_count(here, tmp_path, monkeypatch):
    """Building a package leaves a list of entry points beside its sources, which an editable installation has on the path."""
    distribution(here, "first-pack", "[mtrain.backends]\nthere = outside_plugin_of_first:Mine\n")
    behind = tmp_path / "behind"
    behind.mkdir()
    distribution(behind, "first-pack", "[mtrain.backends]\nthere = moved_away:Mine\nformer = moved_away:Mine\n")
    monkeypatch.setattr(sys, "path", [str(here), *sys.path, str(behind)])
    found = {entry.name: entry for entry in plugins.names("backends")}
    assert "former" not in found
    assert (found["there"].target, found["there"].rivals) == ("outside_plugin_of_first:Mine", ())


def test_a_pin_holds_too_where_two_distributions_name_one_class(here):
    (here / "outside_plugin_d.py").write_text(MODULE)
    for name in ("first-pack", "second-pack"):
        distribution(here, name, "[mtrain.backends]\nboth = outside_plugin_d:Mine\n")
    sys.path.insert(0, str(here))
    rules = policy(here, '[backends.both]\ndistribution = "second-pack"\n')
    assert plugins.find("backends", "both", policy=rules).provider.distribution == "second-pack"
    assert plugins.load("backends", "both", policy=rules).__name__ == "Mine"


def worded(folder: Path, name: str, plugin: str, words: str) -> None:
    """Install a distribution that brings a backend, and says something in its own ``plugins.toml``."""
    package = folder / f"outside_plugin_of_{name}"
    package.mkdir()
    (package / "__init__.py").write_text(MODULE)
    (package / "plugins.toml").write_text(words)
    distribution(folder, f"{name}-pack", f"[mtrain.backends]\n{plugin} = outside_plugin_of_{name}:Mine\n")


def test_what_a_distribution_says_of_its_plugins_lies_between_mtrains_words_and_the_users(here):
    mine = '[backends.worded]\nsummary = "theirs"\noptions = { timeout_s = 60, retries = 1 }\n'
    worded(here, "words", "worded", f'{mine}[backends.ddp]\nsummary = "taken over"\noptions = {{ timeout_s = 1 }}\n')
    worded(here, "rival", "ddp", '[backends.ddp]\nsummary = "better"\noptions = { timeout_s = 1 }\n')
    sys.path.insert(0, str(here))
    rules = policy(here, '[backends.worded]\noptions = { timeout_s = 7 }\n[backends.ddp]\ndistribution = "mtrain"\n')
    found = {entry.name: entry for entry in plugins.names("backends", policy=rules)}
    assert found["worded"].summary == "theirs"
    assert Registry(rules).options("backends", "worded", {}, path="x").model_dump() == {
        "timeout_s": 7,
        "retries": 0,
    }
    assert found["ddp"].summary not in ("taken over", "better")
    assert rules.of("backends", "ddp").options == {}
    (here / "plugins.toml").write_text("")
    assert plugins.read_policy().of("backends", "worded").options == {"timeout_s": 60, "retries": 1}


def test_a_distribution_says_nothing_of_what_may_load(here):
    words = '[backends]\ndisabled = ["ddp"]\nenabled = ["worded"]\n'
    worded(here, "words", "worded", words + '[backends.worded]\ndistribution = "nobody"\nmodule = "os:path"\n')
    sys.path.insert(0, str(here))
    found = {entry.name: entry for entry in plugins.names("backends")}
    assert found["ddp"].enabled
    assert found["worded"].rivals == ()
    assert plugins.load("backends", "worded").__module__ == "outside_plugin_of_words"


def test_of_two_distributions_with_one_name_neither_speaks_for_the_other(here):
    words = '[backends.hf]\noptions = { retries = 9 }\n[models.hf]\ntask = "detection"\n'
    worded(here, "alpha", "hf", words)
    worded(here, "beta", "hf", "[backends.hf]\noptions = { timeout_s = 9 }\n")
    distribution(here, "aaa-pack", "[mtrain.models]\nhf = outside_plugin_of_alpha:Mine\n")
    sys.path.insert(0, str(here))
    rules = policy(here, '[backends.hf]\ndistribution = "beta-pack"\n')
    assert Registry(rules).options("backends", "hf", {}, path="x").model_dump()["retries"] == 0
    assert rules.of("models", "hf").task == "language", "mtrain's packages speak for their own plugins before anybody"


@pytest.mark.smoke
@pytest.mark.job
def test_a_list_of_plugins_leaves_no_file_in_the_home_of_the_user(here):
    """Stevedore would leave one of 40 KB for each state of the current folder."""
    code = "from mtrain.spec import plugins; print(plugins.load('launchers', 'local').__name__)"
    environ = {**os.environ, "HOME": str(here / "home"), "XDG_CACHE_HOME": str(here / "home" / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout == "Local\n"
    assert not (here / "home").exists()


def test_a_pin_that_nothing_satisfies_is_refused(here):
    rules = policy(here, '[backends.ddp]\ndistribution = "somebody"\n')
    with pytest.raises(PluginError, match="no backend 'ddp' from the distribution 'somebody'"):
        plugins.load("backends", "ddp", policy=rules)


@pytest.mark.parametrize("rule", ['disabled = ["solo"]', 'enabled = ["ddp"]'])
def test_a_disabled_name_does_not_load(rule, here):
    rules = policy(here, f"[backends]\n{rule}\n")
    with pytest.raises(PluginError, match=r"the backend 'solo' is disabled by plugins\.toml"):
        plugins.find("backends", "solo", policy=rules)
    assert plugins.find("backends", "ddp", policy=rules).enabled


def test_every_mistake_of_a_policy_is_told(here):
    with pytest.raises(PluginError) as caught:
        policy(here, "[backend.ddp]\nx = 1\n[backends.ddp]\ndistributon = 'a'\n[models]\nenabled = 3\n")
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(str(here)) for line in lines] == [
        "/plugins.toml backend: unknown kind; did you mean 'backends'?",
        "/plugins.toml backends.ddp.distributon: unknown key; did you mean 'distribution'?",
        "/plugins.toml models.enabled: given 3, expected a list, each text or null",
    ]
    with pytest.raises(PluginError, match="not valid TOML"):
        policy(here, "[")


def test_a_class_without_options_or_that_cannot_be_imported_is_refused(here):
    (here / "outside_plugin_e.py").write_text(MODULE)
    rules = policy(
        here, '[backends.bare]\nmodule = "outside_plugin_e:Bare"\n[backends.gone]\nmodule = "outside_plugin_gone:X"\n'
    )
    with pytest.raises(PluginError, match="has no `Options`"):
        plugins.load("backends", "bare", policy=rules)
    with pytest.raises(PluginError, match="cannot be imported: ModuleNotFoundError"):
        plugins.load("backends", "gone", policy=rules)


def test_a_shipped_plugin_that_the_installation_does_not_list_asks_for_a_new_installation(monkeypatch):
    """After `git pull` in a clone the metadata of an editable installation are those of the former version."""
    monkeypatch.setattr(
        plugins, "_list_points", lambda kind: [("vit", "mtrain.models.vit:ViT")] if kind == "models" else []
    )
    monkeypatch.setattr(plugins, "_providers", lambda path: {})
    with pytest.raises(PluginError, match=r"no task 'detection': mtrain ships one, .* install again with: pip install"):
        plugins.find("tasks", "detection")
    with pytest.raises(PluginError, match=r"no model 'vat' \(known: vit\)"):
        plugins.find("models", "vat")


@pytest.mark.parametrize(
    ("text", "message"), [("def (", "SyntaxError"), ("raise RuntimeError('boom')", "RuntimeError: boom")]
)
def test_a_local_module_that_fails_when_imported_is_named(text, message, here):
    (here / "outside_plugin_f.py").write_text(text)
    rules = policy(here, '[backends.broken]\nmodule = "outside_plugin_f:X"\n')
    with pytest.raises(PluginError, match=f"the backend 'broken' .* cannot be imported: {message}"):
        plugins.load("backends", "broken", policy=rules)


def test_a_plugin_whose_constructor_fails_is_named(here):
    failing = "    def __init__(self, options):\n        raise {error}\n"
    text = "from mtrain.errors import SpecError\n" + MODULE.replace('    rendezvous = "none"\n', failing)
    for name, error in (("g", "OSError('no such card')"), ("h", "SpecError('no such card')")):
        (here / f"outside_plugin_{name}.py").write_text(text.replace("{error}", error))
    lines = (f'[backends.{name}]\nmodule = "outside_plugin_{name}:Mine"\n' for name in "gh")
    rules = policy(here, "".join(lines))
    with pytest.raises(PluginError, match=r"'g' \(outside_plugin_g:Mine\) cannot be made .*: OSError: no such card"):
        Registry(rules).make("backends", "g", {}, path="backend.options")
    with pytest.raises(SpecError, match=r"^no such card"):
        Registry(rules).make("backends", "h", {}, path="backend.options")
