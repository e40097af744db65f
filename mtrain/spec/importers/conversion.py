"""Convert files of another project to one checked spec: recognise them, translate them, and write the result."""

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath

from mtrain.spec import config
from mtrain.spec.importers import kinds
from mtrain.spec.importers.documents import read
from mtrain.spec.importers.key_report import Given
from mtrain.spec.importers.translation import Imported, choose_importer, collect_values, layer_of, report
from mtrain.spec.provenance import lookup


def convert(
    files: Sequence[FilePath],
    *,
    importer: str | None = None,
    cards: int | None = None,
    overrides: Sequence[str] = (),
) -> Imported:
    """Return the spec that files of another project describe.

    Args:
        files: one or more files of that project, for example up to three YAMLs of YOLOv5, one of each kind.
        importer: name of the importer plugin; None: the first of mtrain's own that recognises the files.
        cards: number of devices for which a batch per device is meant; None: as the importer assumes.
        overrides: ``PATH=VALUE`` settings of the spec that results, or of a key of the first file, before it is translated.

    Raises: ``SpecError`` if a file is damaged or unknown, describes a feature that mtrain does not have, or has values
    that a spec refuses: one line each, with file and line.
    """
    for file in files:
        kinds.check_name(file)
    documents = [read(file) for file in files]
    own = documents[0].override(overrides)
    books = choose_importer(importer, documents).translate(documents, cards=cards)
    values = collect_values(books)
    loaded = config.load(layer_of(values, documents), overrides=own, environ={}, folder_file=documents[0].path)
    return report(documents, books, _overridden(values, loaded), schema=type(loaded.spec))


def _overridden(values: Mapping[str, Given], loaded: config.Loaded) -> dict[str, Given]:
    """Return ``values`` with the overrides of ``-o``, which change or add values or replace a whole section."""
    result = dict(values)
    for path, origin in loaded.provenance.items():
        keys = path.split(".")
        value = lookup(loaded.values, tuple(keys))
        if origin.kind != "override" or (isinstance(value, dict) and value):
            continue
        enclosing = next((other_path for other_path in result if path.startswith(f"{other_path}.")), None)
        if enclosing is not None:
            path, value = enclosing, lookup(loaded.values, tuple(enclosing.split(".")))
        # A section that was set as a whole replaces the values in it.
        for nested_path in [other_path for other_path in result if other_path.startswith(f"{path}.")]:
            del result[nested_path]
        result[path] = Given(value, origin.text)
    return result
