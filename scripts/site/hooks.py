"""Hooks of MkDocs: documents and files outside `docs` become pages, and links to them lead there.

On a repository page `../examples/own-script/train.py` is a link to that file. On the site it leads to a page with the
file's text, so that the site needs no address of a repository. Diagrams become images, so that it needs no script.
"""

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from commands import page as commands_page
from documents import ROOT, change_links, diagram, links, prose
from errors import page as errors_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from reference import page as reference_page
from shipped import page as shipped_page

DOCS = "docs"
REFERENCE = "reference.md"
GENERATED = {"commands.md": commands_page, "errors.md": errors_page, "shipped.md": shipped_page}
"""Page -> what makes it from the program, apart from REFERENCE."""
_MERMAID = re.compile(r"^```mermaid\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml", ".css": "css", ".md": "markdown"}
_SKIPPED = {"__pycache__", ".ipynb_checkpoints"}
_BOOSTS = {"Get started": 1.5, "How-to": 3.0, "Reference": 1.5, "Explanation": 0.6, "Extend": 0.4, "Results": 0.3}
"""Section of the contents -> factor on its rank in the search: who searches wants to do something first."""
_PAGE_BOOSTS = {
    REFERENCE: 0.3,  # Python: has every word somewhere
    "commands.md": 0.3,  # so has the one of commands
    "files/CHANGELOG.md": 0.2,
    "notebook/performance.md": 0.1,
    "notebook/results.md": 0.1,
}
"""Exceptions of these."""
_SYNONYMS = {
    "backends.md": ("FSDP2", "DeepSpeed ZeRO", "distributed training"),
    "checkpoints.md": ("resume", "early stopping"),
    "coming-from.md": ("callback", "migrate"),
    "data.md": ("own dataset", "custom dataset", "segmentation", "classification"),
    "hosts.md": ("multi-node", "several machines"),
    "language.md": ("fine-tune", "LLM", "LoRA"),
    "memory.md": ("gradient checkpointing", "activation checkpointing", "out of memory", "batch size"),
    "meshes.md": ("tensor parallelism", "pipeline parallelism", "model parallelism"),
    "own-model.md": ("custom model", "own dataset"),
    "quantising.md": ("int8",),
    "reporters.md": ("callback",),
    "script-models.md": ("two optimizers", "GAN"),
    "script-optimizers.md": ("learning rate", "gradient accumulation", "scheduler", "loss function"),
    "serving.md": ("inference server", "REST API"),
    "spec.md": ("learning rate", "batch size", "freeze layers"),
    "sweeping.md": ("hyperparameter search", "tuning"),
    "tutorial-demo.md": ("mAP", "average precision"),
    "tutorial-hosts.md": ("multi-node",),
    "versions.md": ("GPU", "CUDA", "mixed precision", "bf16", "fp16", "python version"),
    "weights.md": ("fine-tune", "freeze layers", "pretrained", "transfer learning"),
}
"""Page -> usual words for what it is about. The search finds it by them before pages that only mention them."""

_places: dict[str, str] = {}
"""Path on the site of each page that does not come from `docs` -> its path in the repository."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for the README, and for everything outside `docs` to which a document links."""
    _places.clear()
    reference = reference_page(ROOT / "mtrain", _on_site("CONTRIBUTING.md"))
    files.append(File.generated(config, REFERENCE, content=reference))
    for place, make in GENERATED.items():
        files.append(File.generated(config, place, content=make()))
    waiting = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
        "examples/README.md",
    ]
    for file in files.documentation_pages():
        if file.generated_by:
            continue
        text = Path(file.abs_src_path or "").read_text(encoding="utf-8")
        waiting.extend(_outside(text, f"{DOCS}/{file.src_uri}"))
    while waiting:
        path = waiting.pop()
        place = _on_site(path)
        if place in _places:
            continue
        text = _page(ROOT / path)
        _places[place] = _source(path)
        files.append(File.generated(config, place, content=text))
        waiting.extend(_outside(text, _source(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages, and diagrams into images."""
    here = page.file.src_uri
    source = _places.get(here, f"{DOCS}/{here}")
    page.meta["tags"] = list(_SYNONYMS.get(here, ()))
    page.meta["search"] = _search(here, source, [section.title for section in page.ancestors])
    if here == REFERENCE or here in GENERATED:
        return markdown

    def change(target: str) -> str:
        path, anchor = _resolve(target, source)
        if path is None:
            return target
        return posixpath.relpath(_on_site(path), posixpath.dirname(here) or ".") + anchor

    def draw(match: re.Match[str]) -> str:
        if not (ROOT / DOCS / diagram(match[1])).is_file():
            return match[0].replace(
                "```mermaid", "```text", 1
            )  # scripts/diagrams has not been run since it was changed
        return f"![diagram]({posixpath.relpath(diagram(match[1]), posixpath.dirname(here) or '.')}){{ .diagram }}"

    return prose(_MERMAID.sub(draw, change_links(markdown, change)), _escape_sections)


def _escape_sections(text: str) -> str:
    """Return prose whose code has no ``<![``, where older HTML parsers of Python see a marked section and fail."""
    return re.sub(r"`([^`\n]*<!\[[^`\n]*)`", lambda match: f"<code>{html.escape(match[1])}</code>", text)


def _search(here: str, source: str, sections: list[str]) -> dict[str, Any]:
    """Return how the search treats a page: code and lists of files would hide the pages for readers."""
    generated = here == REFERENCE or here in GENERATED
    if not generated and not (source.endswith(".md") and (ROOT / source).is_file()):
        return {"exclude": True}
    boosts = [_BOOSTS[section] for section in sections if section in _BOOSTS]
    return {"boost": _PAGE_BOOSTS.get(here, boosts[0] if boosts else 0.3)}


def _outside(text: str, source: str) -> list[str]:
    """Return the files outside `docs` to which a document links."""
    found = (_resolve(target, source)[0] for target in links(text))
    return [path for path in found if path and not path.startswith(f"{DOCS}/")]


def _resolve(target: str, source: str) -> tuple[str | None, str]:
    """Return the path in the repository to which a link leads, and its anchor; None for other links."""
    path, mark, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return None, ""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), path)), mark + anchor


def _source(path: str) -> str:
    """Return the document that a folder shows: its README, else the folder's own listing."""
    if (ROOT / path).is_dir():
        return f"{path}/README.md"
    return path


def _on_site(path: str) -> str:
    """Return the place on the site of a file or folder of the repository."""
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if path == "README.md":
        return "index.md"
    if (ROOT / path).is_dir() or path.endswith("/README.md"):
        return f"files/{path.removesuffix('/README.md')}/index.md"
    return f"files/{path}" if path.endswith(".md") else f"files/{path}.md"


def _page(path: Path) -> str:
    """Return the Markdown of the page for a file or folder."""
    if path.is_dir():
        readme = path / "README.md"
        return readme.read_text(encoding="utf-8") if readme.is_file() else _listing(path)
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        return _notebook(path, text)
    return f"# {path.name}\n\n`{path.relative_to(ROOT)}`\n\n{_fenced(text, _LANGUAGES.get(path.suffix, ''))}"


def _listing(path: Path) -> str:
    lines = [f"# {path.relative_to(ROOT)}", ""]
    for file in sorted(path.rglob("*")):
        if file.is_file() and not _SKIPPED & set(file.parts) and file.suffix not in (".pyc", ".npz", ".jpg"):
            name = file.relative_to(path).as_posix()
            lines.append(f"* [{name}]({name})")
    return "\n".join(lines)


def _notebook(path: Path, text: str) -> str:
    """Return the texts and the code of a notebook."""
    parts = [f"`{path.relative_to(ROOT)}`"]
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(_fenced(source, "python") if cell["cell_type"] == "code" else source)
    return "\n\n".join(parts)


def _fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"
