"""Translate to the options of a model plugin; values that equal a default are not written out."""

from mtrain.spec.importers.key_report import Book, equal
from mtrain.spec.registry import Registry
from mtrain.spec.yaml_reader import Path


class Options:
    """``model.options`` of one model.

    Raises: ``PluginError`` where there is no such model.
    """

    def __init__(self, model: str) -> None:
        fields = Registry.read().load("models", model).Options.model_fields
        self._model = model
        self._defaults = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}

    def carry(self, book: Book, source: str | Path, name: str, *, value: object = ...) -> None:
        """Carry ``source`` over to the option ``name``, unless its value is the default."""
        if not book.has(source):
            return
        value = book.get(source) if value is ... else value
        if equal(value, self._defaults[name]):
            book.same(source, f"the default of model.options.{name} in {self._model}")
        else:
            book.carry(source, f"model.options.{name}", value)
