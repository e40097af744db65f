"""Rules for imports: directions between folders, outside packages of each, and no framework where none is needed."""

import ast
import itertools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mtrain

PACKAGE = Path(mtrain.__file__).parent
FRAMEWORKS = ("torch", "paddle", "horovod", "deepspeed")
FILES = sorted(file for file in PACKAGE.rglob("*.py*") if file.suffix in (".py", ".pyi"))

LAYERS = (
    {"errors", "files"},
    {"spec"},
    {"core"},
    {"report"},
    {"system"},
    {"backup"},
    {"data", "models", "backends", "launchers", "allocations", "weights", "importers", "reporters"},
    {"tasks"},
    {"rank"},
    {"script", "exported"},
    {"jobs"},
    {"cluster"},
    {"clusters"},
    {"comparing", "exporting", "pruning", "pages"},
    {"testing", "sweeping", "serving", "quantising"},
    {"results", "typed"},
    {"api"},
    {"derived", "submitted", "swept", "watching"},
    {"cli"},
)
"""Folders (or files beside them) from the bottom up: one may import what stands lower, never what stands beside or
above it."""
NARROWER = {
    "models": {"core", "errors"},
    "core": {"spec", "errors", "files"},
    "data": {"core", "spec", "errors", "files"},
    "tasks": {"data", "core", "spec", "report", "errors", "files"},
    "rank": {"backup", "core", "spec", "data", "tasks", "weights", "report", "system", "errors"},
    "weights": {"core", "spec", "errors"},
    "backup": {"core", "spec", "system", "errors", "files"},
    "importers": {"spec", "errors"},
    "allocations": {"core", "errors", "files"},
    "reporters": {"core", "report", "spec", "system", "errors", "files"},
    "testing": {"core", "spec", "report", "system", "tasks", "rank", "jobs", "cluster", "comparing", "errors"},
}
"""Folder -> all that it may import, where that is less than its layer allows. What is missing is loaded by plugin
name."""
PLUGINS = {"models", "backends", "launchers", "clusters", "allocations", "reporters"}
"""Folders whose modules nobody imports: they are loaded by plugin name."""
MODELS_MAY_IMPORT = {"nn", "ops", "interfaces"}
"""The modules of core that a model may import."""
OUTSIDE = {
    "core": {"numpy", "pydantic"},
    "core/checkpoint": {"numpy", "safetensors"},
    "spec": {"pydantic", "yaml"},
    "spec/plugins.py": {"pydantic", "yaml", "stevedore"},
    "report": {"numpy", "psutil"},
    "report/rich.py": {"rich"},
    "report/console.py": {"rich"},
    "report/notebook.py": {"IPython"},
    "report/tensorboard.py": {"tensorboard", "numpy", "PIL"},
    "report/plots.py": {"matplotlib", "numpy"},
    "reporters": {"pydantic", "mlflow", "wandb", "visualdl", "numpy", "PIL"},
    "system": {"numpy", "psutil", "pydantic"},
    "backup": {"fsspec"},
    "jobs": {"numpy", "psutil", "yaml"},
    "jobs/host_figures.py": {"prometheus_client"},
    "jobs/metrics_server.py": {"prometheus_client"},
}
"""File or folder -> packages from outside that it may import; every entry is a promise to keep the list short."""


def module(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def area(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(file: Path, *, runtime_only: bool = False) -> set[str]:
    """Modules that a file names in import statements anywhere in it (``from a import b`` counts as ``a.b`` too)."""
    results: set[str] = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if runtime_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            results.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            results.add(str(node.module))
            results.update(f"{node.module}.{alias.name}" for alias in node.names if node.module)
    return results


def areas_imported(file: Path) -> set[str]:
    parts = [name.split(".") for name in imports(file)]
    return {name[1] for name in parts if name[0] == "mtrain" and len(name) > 1 and name[1] != "__version__"} - {
        area(file)
    }


def allowed(folder: str) -> set[str]:
    """Return the folders that a folder may import."""
    place = next(number for number, layer in enumerate(LAYERS) if folder in layer)
    return NARROWER.get(folder, set().union(*LAYERS[:place]) - PLUGINS)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_imports_only_lower_folders(file):
    if area(file) not in {"__init__", "__main__"}:
        assert areas_imported(file) <= allowed(area(file))


def test_every_folder_has_its_layer():
    folders = {area(file) for file in FILES} - {"__init__", "__main__"}
    assert folders == set().union(*LAYERS)


def test_narrower_rules_name_lower_folders():
    for folder, names in NARROWER.items():
        place = next(number for number, layer in enumerate(LAYERS) if folder in layer)
        assert names <= set().union(*LAYERS[:place]), folder


def test_frameworks_are_imported_only_under_backends():
    guilty = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        if area(file) != "backends"
        and any(name.split(".")[0] in FRAMEWORKS for name in imports(file, runtime_only=True))
    ]
    assert guilty == []


@pytest.mark.parametrize("name", OUTSIDE)
def test_low_folders_import_from_outside_only_what_is_stated(name):
    files = [PACKAGE / name] if name.endswith(".py") else sorted((PACKAGE / name).glob("*.py"))
    guilty = []
    for file in files:
        if file.relative_to(PACKAGE).as_posix() in OUTSIDE and not name.endswith(".py"):
            continue
        outside = {found.split(".")[0] for found in imports(file)} - set(sys.stdlib_module_names) - {"mtrain"}
        guilty += [f"{file.name}: {found}" for found in sorted(outside - OUTSIDE[name])]
    assert guilty == []


def test_models_import_only_the_neutral_modules_of_core():
    guilty = []
    for file in (file for file in FILES if area(file) == "models"):
        names = {name for name in imports(file) if name.startswith("mtrain.core.")}
        guilty += [f"{file.name}: {name}" for name in names if name.split(".")[2] not in MODELS_MAY_IMPORT]
        outside = {name.split(".")[0] for name in imports(file)} - set(sys.stdlib_module_names)
        guilty += [f"{file.name}: {name}" for name in outside - {"mtrain", "numpy", "pydantic"}]
    assert guilty == []


def test_modules_that_are_named_in_strings_exist():
    """``part("engine")`` of a backend is loaded by name, and ``("-m", "mtrain.x")`` is started: nobody imports them."""
    folders = [PACKAGE / "backends" / f"_{framework}" for framework in ("torch", "paddle")]
    parts, programs = set(), set()
    for file in (file for file in FILES if file.suffix == ".py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "part":
                parts |= {word.value for word in node.args if isinstance(word, ast.Constant)}
            if isinstance(node, ast.Tuple | ast.List):
                words = [word.value if isinstance(word, ast.Constant) else "" for word in node.elts]
                programs |= {after for word, after in itertools.pairwise(words) if word == "-m"}
    assert {"engine", "rank_environment"} <= parts
    assert {"mtrain.cluster.agent", "mtrain.rank.worker"} <= programs
    assert [part for part in parts if not any((folder / f"{part}.py").exists() for folder in folders)] == []
    ours = [program for program in programs if str(program).startswith("mtrain.")]
    assert [name for name in ours if not (PACKAGE.parent / f"{name.replace('.', '/')}.py").exists()] == []


def test_core_names_no_backend():
    """No text of core equals a backend's name; docstrings and words in sentences are free."""
    from mtrain.spec import plugins

    names = {entry.name for entry in plugins.names("backends") if entry.distribution == "mtrain"}
    guilty = []
    for file in (
        file for file in FILES if area(file) in ("core", "spec", "system", "jobs") and file.name != "model.py"
    ):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                words = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
                guilty += [f"{file.name}:{node.lineno} {word}" for word in words if word in names]
    assert guilty == []


@pytest.mark.parametrize(
    "code",
    [
        "import mtrain, mtrain.api, mtrain.spec.model, mtrain.spec.config, mtrain.core.interfaces",
        "from mtrain.cli import main; main(['--help'])",
        "from mtrain.cli import main; assert main(['config', 'show', '-c', 'yolov5n_bccd']) == 0",
        "from mtrain.cli import main; assert main(['plugins', 'list']) == 0",
        "from mtrain.cli import main; assert main(['plan', '-c', 'yolov5n_bccd', '--backend', 'ddp']) == 0",
        # What a rank loads beside its own framework must not bring another one.
        "import mtrain.rank.worker, mtrain.rank.predict, mtrain.tasks.detection.evaluator, mtrain.report.plots, mtrain.report.tensorboard",
        "import faster_coco_eval, safetensors.numpy, sklearn.cluster, cv2, simplejpeg",
    ],
)
def test_no_framework_is_loaded_by(code, tmp_path):
    check = f"; import sys; bad = [name for name in {FRAMEWORKS!r} if name in sys.modules]; assert not bad, bad"
    subprocess.run([sys.executable, "-c", code + check], check=True, cwd=tmp_path, capture_output=True, timeout=60)


def test_help_does_not_even_load_pydantic():
    code = (
        "from mtrain.cli import main; main(['--help']); import sys\n"
        "bad = [name for name in ('pydantic', 'numpy', 'yaml', 'rich', 'stevedore') if name in sys.modules]\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)


def test_files_form_no_circle():
    files = {module(file): file for file in FILES if file.suffix == ".py"}
    graph = {name: {found for found in imports(file) if found in files} - {name} for name, file in files.items()}
    for name, found in graph.items():
        packages = {each.rpartition(".")[0] for each in found}
        graph[name] = found - packages  # `from package import file` needs the file
    graph["mtrain"] = (
        set()
    )  # it loads its functions when they are first used, see `test_importing_mtrain_loads_nothing_heavy`
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the files


def test_no_submodule_has_the_name_of_a_public_function():
    """``import mtrain.train`` would otherwise replace the function ``mtrain.train`` by a module."""
    modules = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert modules & set(mtrain.__all__) == set()
