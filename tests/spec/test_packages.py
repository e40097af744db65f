"""What a package of mtrain brings is named with that package where it is not installed."""

import ast
import tomllib
from pathlib import Path

import pytest

from mtrain.commands import main
from mtrain.errors import PluginError
from mtrain.spec import packages
from mtrain.spec.registry import Registry
from tests.absent import absent

ROOT = Path(__file__).parents[2]
BROUGHT = [
    (package, kind, name)
    for package, each in packages.PACKAGES.items()
    for kind, names in each.brings.items()
    for name in names
]


@pytest.mark.parametrize(("package", "kind", "name"), BROUGHT, ids=lambda value: str(value))
def test_a_plugin_is_there_with_its_package_and_names_it_without(package, kind, name):
    assert Registry.read().find(kind, name).provider.distribution == package
    with absent(package), pytest.raises(PluginError) as error:
        Registry.read().find(kind, name)
    (line,) = str(error.value).splitlines()
    assert f"{name!r} is of {package}, which is not installed: pip install " in line
    assert line.endswith((f"packages/{package}", f"packages/{package}'"))


def test_every_plugin_of_a_package_is_in_the_table():
    modules = {package.replace("-", "_"): package for package in packages.PACKAGES}
    found = [
        (modules[module], kind, entry.name)
        for kind in ("commands", *packages.PACKAGES["mtrain-language"].brings, "clusters", "allocations", "reporters")
        for entry in Registry.read().names(kind)
        if (module := packages.module_of(entry.target)) in modules
    ]
    assert set(found) <= set(BROUGHT)


@pytest.mark.parametrize("mesh", ["tensor", "pipeline"])
def test_a_mesh_that_divides_models_is_refused_before_a_rank_starts(mesh, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["-c", "digits", "--backend", "fsdp", "--nproc-per-node", "2", "--devices", "cpu"]
    with absent("mtrain-language"):
        assert main(["train", *words, "-o", f"parallel.{mesh}=2"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert main(["plan", *words, "-o", "parallel.shard=2"]) == 0
    assert line.startswith(
        f"error: parallel.{mesh}: it needs what is of mtrain-language, which is not installed: pip install "
    )
    assert not (tmp_path / "runs").exists()


def extras() -> set[str]:
    """Return what can be installed: the extras of mtrain, its packages, and their extras."""
    core = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {"", *core["optional-dependencies"]}
    for file in ROOT.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        known |= {
            project["name"],
            *(f"{project['name']}[{extra}]" for extra in project.get("optional-dependencies", {})),
        }
    return known


def named_extras(tree: ast.AST) -> set[str]:
    """Return the texts that calls of ``remedies.install`` and ``remedies.require`` name as extras."""
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("install", "require")
        ):
            given = [word.value for word in node.keywords if word.arg == "extra"] or node.args[:1]
            if isinstance(node.func.value, ast.Name) and node.func.value.id == "remedies" and given:
                found |= {each.value for each in given if isinstance(each, ast.Constant)}
    return found


def test_every_remedy_names_what_can_be_installed() -> None:
    known, wrong = extras(), []
    files = [*ROOT.glob("mtrain/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]
    for file in files:
        text = file.read_text()
        if "remedies." in text:
            wrong += [f"{file.relative_to(ROOT)}: {extra}" for extra in named_extras(ast.parse(text)) - known]
    policies = [ROOT / "mtrain/plugins.toml", *ROOT.glob("packages/*/src/*/plugins.toml")]
    for file in policies:
        kinds = tomllib.loads(file.read_text())
        named = {plugin.get("extra", "") for plugins in kinds.values() for plugin in plugins.values()}
        wrong += [f"{file.relative_to(ROOT)}: {extra}" for extra in named - known]
    assert len(files) > 500
    assert not wrong, "\n".join(wrong)
