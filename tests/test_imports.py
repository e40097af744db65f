"""Rules for imports: directions between folders, outside packages of each, and no framework where none is needed."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mtrain
from mtrain.spec import packages
from tests.sources import PACKAGES, ROOT, nodes, source_files

pytestmark = pytest.mark.smoke

PACKAGE = Path(mtrain.__file__).parent
FRAMEWORKS = ("torch", "paddle", "horovod", "deepspeed")
BY_NAME = source_files(endings=(".py", ".pyi"), trace=True)
FILES = [file for file in BY_NAME.values() if file.is_relative_to(PACKAGE)]
"""Files of the core."""
OF_PACKAGES = {name: file for name, file in BY_NAME.items() if not file.is_relative_to(PACKAGE)}

LAYERS = (
    {"errors"},
    {"spec"},
    {"core"},
    {"system"},
    {"data", "weights", "models", "backends", "records"},
    {"tasks"},
    {"rank"},
    {"jobs", "keras"},
    {"launchers"},
    {"compare"},
    {"commands"},
)
"""Rooms from the bottom up: one may import what stands lower, never what stands beside or above it."""
NARROWER = {
    "models": {"core", "errors"},
    "core": {"spec", "errors"},
    "data": {"core", "spec", "errors"},
    "tasks": {"data", "core", "spec", "records", "errors"},
    "rank": {"core", "spec", "data", "tasks", "weights", "records", "system", "errors"},
    "weights": {"core", "spec", "system", "errors"},
    "records": {"core", "spec", "system", "errors"},
}
"""Room -> all that it may import, where that is less than its layer allows. What is missing is loaded by plugin
name."""
PLUGINS = {"models", "backends", "launchers"}
"""Rooms whose modules nobody imports: they are loaded by plugin name."""
MODELS_MAY_IMPORT = {"nn", "ops", "interfaces", "compiling"}
"""The modules of core that a model may import."""
OUTSIDE = {
    "core": {"numpy", "pydantic"},
    "core/interfaces": {"numpy", "pydantic"},
    "core/checkpoint": {"numpy", "safetensors"},
    "core/overriding.py": {"typing_extensions"},
    "core/state/trace.py": {"numpy", "mtrain_trace"},
    "spec": {"pydantic", "yaml"},
    "spec/bounds.py": {"psutil"},
    "spec/plugins.py": {"pydantic", "stevedore"},
    "records": {"numpy", "psutil"},
    "records/rich.py": {"rich"},
    "records/console.py": {"rich"},
    "records/notebook.py": {"IPython"},
    "records/tensorboard.py": {"tensorboard", "numpy", "PIL"},
    "records/plots.py": {"matplotlib", "numpy"},
    "records/reporters": {"pydantic", "numpy", "PIL"},
    "system": {"numpy", "psutil", "pydantic", "mtrain_trace"},
    "system/http_connections.py": {"h11", "uvicorn"},
    "weights/backup": {"fsspec", "mtrain_trace"},
    "jobs": {"numpy", "psutil", "yaml"},
    "jobs/run/host_collector.py": {"prometheus_client"},
    "jobs/run/metrics_server.py": {"prometheus_client"},
}
"""File or folder -> packages from outside that it may import; every entry is a promise to keep the list short."""


BASE = {"click", "numpy", "psutil", "pydantic", "pydantic_core", "rich", "safetensors", "stevedore", "yaml"}
"""Packages that an installation without an extra brings."""
WANT_AN_EXTRA = (
    *("backends", "data/images", "tasks/detection", "tasks/classification", "tasks/segmentation"),
    *("records/plots.py", "records/tensorboard.py", "records/notebook.py"),
    *("system/http_connections.py", "jobs/run/host_collector.py", "jobs/run/metrics_server.py"),
)
"""Files and folders that may import more than that while they are loaded: nothing that needs no extra loads them."""


def module(name: str) -> str:
    parts = Path(name if name in OF_PACKAGES else f"mtrain/{name}").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def area(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


@cache
def imports(file: Path, *, runtime_only: bool = False) -> set[str]:
    """Modules that a file names in import statements anywhere in it (``from a import b`` counts as ``a.b`` too)."""
    results: set[str] = set()
    skipped = {
        id(inner)
        for node in nodes(file)
        if runtime_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in nodes(file):
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


FOR_TYPES = {"spec/resolved.py": {"core"}}
"""Folders further up that a file may name in types alone: the job as an object has the plugins' interfaces as its types."""


def test_a_file_imports_only_lower_folders():
    guilty = [
        f"{name}: {', '.join(sorted(names))}"
        for file in FILES
        if area(file) not in {"__init__", "__main__"}
        and (
            names := areas_imported(file)
            - allowed(area(file))
            - FOR_TYPES.get(name := str(file.relative_to(PACKAGE)), set())
        )
    ]
    assert guilty == []


def test_what_is_named_in_types_alone_is_not_imported():
    imported = {name: imports(PACKAGE / name, runtime_only=True) for name in FOR_TYPES}
    assert [
        n
        for name, areas in FOR_TYPES.items()
        for n in imported[name]
        for area in areas
        if n.startswith(f"mtrain.{area}")
    ] == []


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


def test_click_is_imported_only_by_commands():
    """Those of mtrain lie in `commands/`, and those of a package in a folder of this name."""
    guilty = [
        name
        for name, file in BY_NAME.items()
        if "commands" not in Path(name).parts[:2] and any(each.split(".")[0] == "click" for each in imports(file))
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


def loaded_with(body: list[ast.stmt]) -> set[str]:
    """Packages that statements import as they are run, without the bodies of functions and of ``TYPE_CHECKING``."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.ClassDef | ast.Try | ast.With):
            names |= loaded_with(node.body)
        elif isinstance(node, ast.If):
            names |= loaded_with(node.orelse if "TYPE_CHECKING" in ast.dump(node.test) else node.body + node.orelse)
    return names


def test_packages_of_extras_are_imported_where_they_are_used():
    guilty = []
    for file in (file for file in FILES if file.suffix == ".py"):
        name = file.relative_to(PACKAGE).as_posix()
        if not any(name == place or name.startswith(f"{place}/") for place in WANT_AN_EXTRA):
            outside = loaded_with(nodes(file)[0].body) - set(sys.stdlib_module_names)
            guilty += [
                f"{name}: {found}" for found in sorted(outside - BASE - packages.MODULES - {"mtrain", "mtrain_trace"})
            ]
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
    for file in (file for file in BY_NAME.values() if file.suffix == ".py"):
        for node in nodes(file):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "part":
                parts |= {word.value for word in node.args if isinstance(word, ast.Constant)}
            if isinstance(node, ast.Tuple | ast.List):
                words = [word.value if isinstance(word, ast.Constant) else "" for word in node.elts]
                programs |= {after for word, after in itertools.pairwise(words) if word == "-m"}
    assert {"engine", "rank_environment"} <= parts
    assert {"mtrain.jobs.hosts.agent", "mtrain.rank.worker"} <= programs
    assert [part for part in parts if not any((folder / f"{part}.py").exists() for folder in folders)] == []
    ours = [program for program in programs if str(program).startswith("mtrain")]
    modules = {each for name in BY_NAME for each in (module(name), module(name).removesuffix(".__main__"))}
    assert [name for name in ours if name not in modules] == []


def test_core_names_no_backend():
    """No text of core equals a backend's name; docstrings and words in sentences are free."""
    from mtrain.spec import plugins

    names = {entry.name for entry in plugins.names("backends") if entry.is_own}
    guilty = []
    for file in (
        file for file in FILES if area(file) in ("core", "spec", "system", "jobs") and file.name != "model.py"
    ):
        for node in nodes(file):
            if isinstance(node, ast.Compare):
                words = {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
                guilty += [f"{file.name}:{node.lineno} {word}" for word in words if word in names]
    assert guilty == []


@pytest.mark.job
@pytest.mark.parametrize(
    "code",
    [
        "import mtrain, mtrain.commands.functions, mtrain.spec.model, mtrain.spec.config, mtrain.core.interfaces",
        "from mtrain.commands import main; main(['--help'])",
        "from mtrain.commands import main; assert main(['config', 'show', '-c', 'yolov5n_bccd']) == 0",
        "from mtrain.commands import main; assert main(['plugins', 'list']) == 0",
        "from mtrain.commands import main; assert main(['plan', '-c', 'yolov5n_bccd', '--backend', 'ddp']) == 0",
        # What a rank loads beside its own framework must not bring another one.
        "import mtrain.rank.worker, mtrain.rank.spec.predict, mtrain.tasks.detection.evaluator\n"
        "import mtrain.records.plots, mtrain.records.tensorboard",
        "import faster_coco_eval, safetensors.numpy, sklearn.cluster, cv2, simplejpeg",
    ],
)
def test_no_framework_is_loaded_by(code, tmp_path):
    check = f"; import sys; bad = [name for name in {FRAMEWORKS!r} if name in sys.modules]; assert not bad, bad"
    subprocess.run([sys.executable, "-c", code + check], check=True, cwd=tmp_path, capture_output=True, timeout=60)


@pytest.mark.job
def test_help_does_not_even_load_pydantic(tmp_path):
    """Nor what takes long to import, where the list of verbs is not kept yet."""
    code = (
        "from mtrain.commands import main; main(['--help']); import sys\n"
        "heavy = ('pydantic', 'numpy', 'yaml', 'rich', 'stevedore', 'importlib.metadata', 'email', 'hashlib', 'difflib')\n"
        "bad = [name for name in heavy if name in sys.modules]\n"
        "assert not bad, bad"
    )
    kept = {**os.environ, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60, env=kept)
    assert list(tmp_path.glob(".cache/mtrain/verbs/*.json"))


def test_files_form_no_circle():
    files = {module(name): file for name, file in BY_NAME.items() if file.suffix == ".py"}
    graph = {name: {found for found in imports(file) if found in files} - {name} for name, file in files.items()}
    for name, found in graph.items():
        folders = {each.rpartition(".")[0] for each in found}
        graph[name] = found - folders  # `from package import file` needs the file
    for name in ("mtrain", *packages.MODULES):
        graph[name] = set()  # it loads its functions when they are first used
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the files


def test_no_submodule_has_the_name_of_a_public_function():
    """``import mtrain.train`` would otherwise replace the function ``mtrain.train`` by a module."""
    modules = {file.relative_to(PACKAGE).parts[0].removesuffix(".py") for file in FILES}
    assert modules & set(mtrain.__all__) == set()


# ------------------------------------------------------------------------------- the core and the packages beside it
DISTRIBUTED = {"pyyaml": {"yaml"}, "pillow": {"PIL"}, "opencv-python-headless": {"cv2"}, "scikit-learn": {"sklearn"}}
"""Distribution -> its modules, where they have another name than it has."""
HAVE_FRAMEWORKS = {
    "mtrain_trace/": {"torch", "paddle", "tensorflow", "keras"},  # records what they do
    "mtrain_tensorflow/": {"tensorflow"},  # is loaded by scripts of it
    "mtrain_deploy/exporting/paddle_program": {"paddle"},  # is loaded by the rank that exports
    "mtrain_deploy/exporting/torch_program": {"torch"},
    "mtrain_language/meshes/": {"torch"},  # is loaded by the backend fsdp
}
"""Folder of a package -> the frameworks that its modules import."""


def frameworks_of(name: str) -> set[str]:
    """Return the frameworks that a file of a package may import."""
    return next((found for folder, found in HAVE_FRAMEWORKS.items() if name.startswith(folder)), set())


def test_the_core_imports_no_package_but_that_of_traces():
    guilty = {
        (file.relative_to(PACKAGE).as_posix(), top)
        for file in FILES
        for top in {name.split(".")[0] for name in imports(file)}
        if top in packages.MODULES
    }
    assert guilty == set()


def test_the_core_names_no_module_of_a_package():
    """What is imported or started by its name is an import too; packages are found through entry points."""
    word = re.compile(rf"(?:{'|'.join(sorted(packages.MODULES))})(?:[.:]\w+)*")
    guilty = {
        file.relative_to(PACKAGE).as_posix()
        for file in FILES
        for node in nodes(file)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and word.fullmatch(node.value)
    }
    assert guilty == {"__init__.py"}, "`mtrain.export` is that of mtrain-deploy while it is installed; nothing else is"


@cache
def needs(folder: Path, *, extras: bool) -> dict[str, set[str]]:
    """Return the distributions that a project requires -> the extras of each, with those of its own extras if ``extras``."""
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = list(project["dependencies"])
    for more in project.get("optional-dependencies", {}).values() if extras else ():
        lines += more
    found: dict[str, set[str]] = {}
    for need in map(Requirement, lines):
        found.setdefault(need.name, set()).update(need.extras)
    return found


def project_of(package: str) -> Path:
    return ROOT / "packages" / package.replace("_", "-")


def test_every_package_has_a_description_and_a_row_in_the_table_of_packages():
    assert {*packages.MODULES, "mtrain_trace"} == set(PACKAGES)
    assert all((project_of(package) / "pyproject.toml").is_file() for package in PACKAGES)


def test_a_package_imports_another_one_only_if_its_description_names_it():
    guilty = []
    for name, file in OF_PACKAGES.items():
        package = name.split("/")[0]
        named = {each.replace("-", "_") for each in needs(project_of(package), extras=True)}
        known = {*named, package, *({"mtrain_trace"} if "mtrain" in named else ())}  # which mtrain requires
        tops = {each.split(".")[0] for each in imports(file)}
        guilty += [f"{name}: {top}" for top in sorted(tops - known) if top in {"mtrain", *PACKAGES}]
    assert guilty == []


def test_a_package_imports_frameworks_only_where_it_is_loaded_by_one():
    guilty = []
    for name, file in OF_PACKAGES.items():
        tops = {each.split(".")[0] for each in imports(file, runtime_only=True)}
        guilty += [
            f"{name}: {top}" for top in sorted(tops & {*FRAMEWORKS, "tensorflow", "keras"} - frameworks_of(name))
        ]
    assert guilty == []


def modules_of(names: set[str]) -> set[str]:
    return {module for name in names for module in DISTRIBUTED.get(name, {name.replace("-", "_")})}


def test_what_a_package_imports_while_it_is_loaded_is_in_its_description_or_in_mtrains():
    core = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    guilty = []
    for name, file in OF_PACKAGES.items():
        package = name.split("/")[0]
        own = needs(project_of(package), extras=True)
        known = modules_of(set(own)) | frameworks_of(name)
        if "mtrain" in own:
            known |= BASE | {"mtrain_trace"}
            known |= modules_of({Requirement(line).name for extra in own["mtrain"] for line in core[extra]})
        outside = loaded_with(nodes(file)[0].body) - set(sys.stdlib_module_names) - {"mtrain", package}
        guilty += [f"{name}: {top}" for top in sorted(outside - known)]
    assert guilty == []


# Rooms whose names begin no key of a spec and no name of a file.
NAMED = re.compile(r"``(?:mtrain[./])?((?:core|system|backends|records|tasks|rank|jobs|launchers)[./][\w./]+)")


def named_module_is_there(name: str) -> bool:
    """Whether a word such as ``core.update.loop.Loop`` or ``core/nn.pyi`` leads to a file, and then to a name that it holds."""
    parts = re.split(r"[./]", name.removesuffix(".pyi").removesuffix(".py").rstrip("./"))
    for length in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:length])
        files = [
            file for file in (path.with_suffix(".py"), path.with_suffix(".pyi"), path / "__init__.py") if file.exists()
        ]
        if files:
            return length == len(parts) or any(re.search(rf"\b{parts[length]}\b", file.read_text()) for file in files)
    return False


def test_modules_that_docstrings_and_comments_name_are_there() -> None:
    wrong = [
        f"{name}: {found}"
        for name, file in BY_NAME.items()
        for found in NAMED.findall(file.read_text())
        if not named_module_is_there(found)
    ]
    assert not wrong, "\n".join(wrong)
