"""Types of options that refuse what an API server or the kubelet refuses: names, labels, amounts, tolerations and paths."""

import posixpath
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

MAX_LABEL = 63
"""Longest name of a host, and longest value of a label (RFC 1123; the limits of Kubernetes)."""
MAX_INT32 = (1 << 31) - 1
"""Largest value of most numbers in the Kubernetes API, and of the number of a user."""
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"^{LABEL}(\.{LABEL})*$"
QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"
VARIABLE = re.compile(r"[-._A-Za-z][-._A-Za-z0-9]*")
IMAGE = re.compile(
    r"([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?(:[0-9]+)?/)?"  # a registry
    r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][-A-Za-z0-9_.]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_BINARY, _DECIMAL = "KMGTPE", "kMGTPE"
T = TypeVar("T")


def _rule(pattern: re.Pattern[str], expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(f"given {text!r}, expected {expected}")
        return text

    return AfterValidator(check)


def _label_value(text: str) -> str:
    if len(text) > MAX_LABEL or (text and not re.fullmatch(QUALIFIED, text)):
        raise ValueError(
            f"given {text!r}, expected a label's value: at most {MAX_LABEL} letters, digits, -, _ and ., beginning and "
            "ending with a letter or digit"
        )
    return text


def _label_key(text: str) -> str:
    prefix, slash, name = text.rpartition("/")
    fits = len(name) <= MAX_LABEL and re.fullmatch(QUALIFIED, name)
    if not fits or (slash and (len(prefix) > 253 or not re.fullmatch(SUBDOMAIN, prefix))):
        raise ValueError(f"given {text!r}, expected a label's key, such as gpu or example.com/gpu")
    return text


def _variable(text: str) -> str:
    if not VARIABLE.fullmatch(text) or text.startswith(".."):
        raise ValueError(f"given {text!r}, expected the name of an environment variable: letters, digits and _")
    return text


def _folder(text: str) -> str:
    if ".." in text.split("/"):
        raise ValueError(f"given {text!r}, expected a path without ..")
    return posixpath.normpath(text)


def _amount(text: str) -> str:
    if not amount(text):
        raise ValueError(f"given {text!r}, expected more than nothing")
    return text


def amount(quantity: str) -> Fraction:
    """Return a quantity of Kubernetes as a number: ``500m`` is a half, ``1Ki`` is 1024."""
    number = quantity.rstrip("mikKMGTPE")
    suffix = quantity[len(number) :]
    if suffix == "m":
        return Fraction(number) / 1000
    factor: int = 1000 ** (_DECIMAL.index(suffix) + 1) if suffix in _DECIMAL and suffix else 1
    if suffix.endswith("i"):
        factor = 1024 ** (_BINARY.index(suffix[0]) + 1)
    return Fraction(number) * factor


Name = Annotated[str, Field(pattern=SUBDOMAIN, max_length=253)]
"""Name of an object that exists in the cluster already."""
ShortName = Annotated[str, Field(pattern=rf"^{LABEL}$", max_length=MAX_LABEL)]
"""Name of a namespace, or one that is the value of a label too."""
# The API has no amounts below a thousandth.
Cores = Annotated[
    str,
    BeforeValidator(lambda value: str(value)),
    _rule(re.compile(r"[0-9]+(\.[0-9]{1,3})?|[0-9]+m"), "cores, such as 4, 0.5 or 500m"),
    AfterValidator(_amount),
]
"""A number of processors."""
Memory = Annotated[
    str,
    BeforeValidator(lambda value: str(value)),
    _rule(re.compile(QUANTITY.replace("m|", "")), "bytes, such as 16Gi or 500M"),
    AfterValidator(_amount),
]
"""An amount of memory as Kubernetes writes it."""
Folder = Annotated[str, Field(pattern=r"^/[^:,]+$"), AfterValidator(_folder)]
"""Absolute path in a container; ``:`` cannot be mounted."""
LabelKey = Annotated[str, AfterValidator(_label_key)]
LabelValue = Annotated[str, AfterValidator(_label_value)]
Variable = Annotated[str, AfterValidator(_variable)]
Image = Annotated[
    str, _rule(IMAGE, "a container image, such as registry.example/team/mtrain:1; its path is in lower case")
]
SecretKey = Annotated[
    str,
    _rule(re.compile(rf"{SUBDOMAIN.strip('^$')}/[-._A-Za-z0-9]+"), "SECRET/KEY: the name of a Secret, and a key of it"),
]
"""A key of a Secret, ``SECRET/KEY``."""


class Toleration(BaseModel):
    """A toleration of a taint, under the rules of the API server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    tolerationSeconds: int | None = None

    def problem(self) -> str | None:
        """Return what the API server says against it; None: nothing."""
        if self.operator == "Exists" and self.value:
            return f"operator Exists takes no value, given {self.value!r}; leave it out, or take operator Equal"
        if self.key is None and self.operator != "Exists":
            return "no key is given, which tolerates every taint, with operator Exists alone; add it, or a key"
        if self.tolerationSeconds is not None and self.effect != "NoExecute":
            return f"tolerationSeconds is for the effect NoExecute, given {self.effect or 'none'}"
        return None


def _toleration(toleration: Toleration) -> Toleration:
    if problem := toleration.problem():
        raise ValueError(problem)
    return toleration


Tolerated = Annotated[Toleration, AfterValidator(_toleration)]


def overlap(paths: Mapping[str, str], taken: Sequence[str]) -> tuple[str, str] | None:
    """Return the key of a folder that cannot be mounted, and what is in its way: a folder, with its key; None: all can.

    A folder in another one would have to be made there, which a read-only one does not allow, and would hide a part of it.
    ``paths``: key -> folder. ``taken``: folders that are mounted in any case.
    """
    mounted = {path: path for path in taken}
    for key, path in paths.items():
        for other, shown in mounted.items():
            if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
                return key, shown
        mounted[path] = f"{key} {path}"
    return None


def literal(word: str) -> str:
    """Return a word of a command, or a variable's value, in which the kubelet replaces nothing: it expands ``$(NAME)``."""
    return word.replace("$", "$$")


def present(value: BaseModel) -> dict[str, Any]:
    """Return the fields of a part of a pod that are set."""
    return value.model_dump(exclude_none=True)
