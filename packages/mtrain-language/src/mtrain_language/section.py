"""What language modelling adds to a spec. Imports no framework and no library of tokens."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from mtrain.spec.model import DataSpec, Spec
from mtrain.spec.pathnames import PathText
from mtrain.spec.section import Count, Positive, Section, narrowed

BYTES = "bytes"
"""Name of the tokenizer that needs no file: each byte of UTF-8 is a token."""


class LanguageDataSpec(DataSpec):
    """Texts, cut into tokens and packed into rows of one length."""

    tokenizer: PathText = Field(default=BYTES, description="bytes, a tokenizer.json, or the folder of a model with one")
    end_token: str | None = Field(
        default=None, description="token after each document; null: as the tokenizer's files say"
    )
    chat_template: PathText | None = Field(
        default=None, description="how conversations become text: chatml, or a file in Jinja; null: the tokenizer's"
    )
    length: Annotated[int, Field(ge=2, le=1 << 20)] = Field(
        default=256, description="tokens in a row; documents are packed, and none sees another"
    )
    split: Annotated[float, Field(gt=0.0, lt=1.0)] | None = Field(
        default=None, description="share of `train` (null: of all documents) that becomes the evaluation split"
    )
    split_seed: Count = Field(default=0, description="chooses the documents for `split`")

    @model_validator(mode="after")
    def _evaluation_split_is_given_once(self) -> Self:
        if self.split is not None and self.val is not None:
            raise ValueError(
                f"split ({self.split}) takes the evaluation split from the training documents, but val ({self.val}) is "
                "given too; set one of them to null"
            )
        return self


class GenerateSpec(Section):
    """How `mtrain predict` continues a text."""

    tokens: Positive = Field(default=128, description="most tokens that are added to a text")
    temperature: float = Field(default=0.0, ge=0, description="0: the most likely token each time; above: drawn")
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0, description="draws from the likeliest tokens of this probability"
    )


def has_conversations(section: LanguageDataSpec) -> bool:
    """Return whether documents are conversations, see the options of the data set ``text``."""
    return section.options.get("messages") is not None


def data_of(spec: Spec) -> LanguageDataSpec:
    """Return the data section of a job on language.

    Raises:
        SpecError: The job is of another task.
    """
    return narrowed(spec.data, LanguageDataSpec, where="data")
