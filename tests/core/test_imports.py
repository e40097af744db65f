"""Who may import whom: directions between folders, outside packages of each, and no framework where none is needed."""

import ast
import subprocess
import sys
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mtrain

PACKAGE = Path(mtrain.__file__).parent
FRAMEWORKS = ("torch", "paddle", "horovod", "deepspeed")
FILES = sorted(file for file in PACKAGE.rglob("*.py*") if file.suffix in (".py", ".pyi"))

MAY_IMPORT = {
    "core": set(),
    "models": {"core"},
    "data": {"core"},
    "backends": {"core"},
    "launchers": {"core"},
    "cli": {"comparing", "core", "data", "hosts", "importing", "testing", "top", "weights"},
    "comparing": {"core"},
    "hosts": {"core", "top"},
    "importing": {"core"},
    "testing": {"comparing", "core", "top"},
    "weights": {"core"},
    "top": {"core", "data", "cli", "weights"},
}
"""Folder -> folders it may import; ``top`` is mtrain/*.py. Whatever else is needed is loaded by plugin name."""
STARTERS = ("starting", "several", "plugins", "doctor")
EXCEPTIONS = {
    (file, "mtrain.launchers.environment")
    for file in (*(f"cli/{name}.py" for name in STARTERS), "hosts/agent.py", "hosts/facts.py")
}
"""(file, module): starters read the caller's environment, which only launchers may; it is no plugin."""
MODELS_MAY_IMPORT = {"nn", "ops", "errors", "interfaces"}
"""The modules of core that a model may import."""
CORE_OUTSIDE = {
    "*": {"numpy", "pydantic", "yaml"},
    "plugins.py": {"stevedore"},
    "checkpoint.py": {"safetensors"},
    "checkpoint_files.py": {"safetensors"},
    "launch.py": {"psutil"},
    "processes.py": {"psutil"},
    "placement.py": {"psutil"},
    "runfolder.py": {"psutil"},
    "plan.py": {"psutil"},
    "report*.py": {"rich", "tensorboard", "matplotlib", "psutil"},
    "reporting/*.py": {"rich", "tensorboard", "matplotlib", "psutil"},
}
"""File pattern in core -> packages from outside that it may import; every entry is a promise to keep the list short."""


def module(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def area(file: Path) -> str:
    parts = file.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "top"


def imports(file: Path, *, runtime_only: bool = False) -> set[str]:
    """Modules that a file names in import statements anywhere in it (``from a import b`` counts as ``a.b`` too)."""
    found: set[str] = set()
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
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(str(node.module))
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.module)
    return found


def areas_imported(file: Path) -> set[str]:
    areas = set()
    inner = file.relative_to(PACKAGE).as_posix()
    excepted = {module for name, module in EXCEPTIONS if name == inner}
    for name in imports(file):
        parts = name.split(".")
        if name in excepted or any(module.startswith(f"{name}.") for module in excepted):
            continue
        if parts[0] == "mtrain" and len(parts) > 1 and parts[1] != "__version__":
            areas.add(parts[1] if (PACKAGE / parts[1]).is_dir() else "top")
    return areas - {area(file)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_file_imports_only_folders_that_its_folder_may(file):
    assert areas_imported(file) <= MAY_IMPORT[area(file)]


def test_no_folder_cycle():
    graph = defaultdict(set)
    for file in FILES:
        graph[area(file)] |= {name for name in areas_imported(file) if name != "top"} - {area(file)}

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo += graph[name]
        return seen

    assert [name for name in list(graph) if name != "top" and name in reach(name)] == []


def test_frameworks_are_imported_only_under_backends():
    guilty = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        if area(file) != "backends"
        and any(name.split(".")[0] in FRAMEWORKS for name in imports(file, runtime_only=True))
    ]
    assert guilty == []


def test_core_imports_from_outside_only_what_is_stated():
    guilty = []
    for file in (file for file in FILES if area(file) == "core"):
        inner = file.relative_to(PACKAGE / "core")
        allowed = set().union(
            *(names for pattern, names in CORE_OUTSIDE.items() if pattern == "*" or inner.match(pattern))
        )
        outside = {name.split(".")[0] for name in imports(file)} - set(sys.stdlib_module_names) - {"mtrain"}
        guilty += [f"{inner}: {name}" for name in sorted(outside - allowed)]
    assert guilty == []


def test_models_import_only_the_neutral_modules_of_core():
    guilty = []
    for file in (file for file in FILES if area(file) == "models"):
        names = {name for name in imports(file) if name.startswith("mtrain.core.")}
        guilty += [f"{file.name}: {name}" for name in names if name.split(".")[2] not in MODELS_MAY_IMPORT]
        outside = {name.split(".")[0] for name in imports(file)} - set(sys.stdlib_module_names)
        guilty += [f"{file.name}: {name}" for name in outside - {"mtrain", "numpy", "pydantic"}]
    assert guilty == []


def test_core_names_no_backend():
    """No text of core equals a backend's name; docstrings and words in sentences are free."""
    from mtrain.core import plugins

    names = {entry.name for entry in plugins.names("backends") if entry.distribution == "mtrain"}
    guilty = []
    for file in (file for file in FILES if area(file) == "core" and file.name != "spec.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                words = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
                guilty += [f"{file.name}:{node.lineno} {word}" for word in words if word in names]
    assert guilty == []


@pytest.mark.parametrize(
    "code",
    [
        "import mtrain, mtrain.core.spec, mtrain.core.config, mtrain.core.interfaces",
        "from mtrain.cli import main; main(['--help'])",
        "from mtrain.cli import main; assert main(['config', 'show', '-c', 'yolov5n_bccd']) == 0",
        "from mtrain.cli import main; assert main(['plugins', 'list']) == 0",
        "from mtrain.cli import main; assert main(['plan', '-c', 'yolov5n_bccd', '--backend', 'ddp']) == 0",
        # What a rank loads beside its own framework must not bring another one.
        "import mtrain.worker, mtrain.predicting, mtrain.data.evaluation, mtrain.core.report_plots, mtrain.core.report_tensorboard",
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
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the files
