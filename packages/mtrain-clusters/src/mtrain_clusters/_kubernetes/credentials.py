"""Refuse credentials in clear text: whoever may read the objects of a job could read them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtrain.errors import UsageError
from mtrain.system import environment
from mtrain_trace import masking

PASSWORD = re.compile(r"://[^/\s@:]*:[^/\s@]+@")
"""A user and a password in a URL."""
NAMED = ("env", "reporters")
"""Sections whose keys users choose, or services do; a key there whose name says that it is secret counts."""


def refuse_clear_text(values: Mapping[str, Any], env: Mapping[str, str], arguments: Sequence[str]) -> None:
    """Refuse a job that has a credential in clear text.

    Args:
        values: the spec of the pods.
        env: the environment variables of the pods.
        arguments: the arguments of the user's script.

    Raises:
        UsageError: each place that has one, and how to give it as a Secret.
    """
    found = [f"cluster.options.env.{name}" for name, value in env.items() if _is_secret(name, value)]
    found += list(_places(values, ()))
    # A word that redaction changes holds what it takes for a secret.
    masked = environment.redacted_words(arguments)
    found += [f"argument {word}" for word, given in zip(masked, arguments, strict=True) if word != given]
    if found:
        raise UsageError(
            f"{', '.join(found)}: holds a credential in clear text, which everybody could read who may see the job; put it "
            "into a Secret (`kubectl create secret generic NAME --from-literal=KEY=...`), and name that with "
            "cluster.options.secret_env.VARIABLE=NAME/KEY, or cluster.options.env_from=[NAME]; libraries read the variable, "
            "such as AWS_SECRET_ACCESS_KEY, MLFLOW_TRACKING_PASSWORD or WANDB_API_KEY"
        )


def _places(node: Any, path: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _places(value, (*path, str(key)))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _places(value, (*path, str(index)))
    elif isinstance(node, str) and node:
        name = path[-1] if set(NAMED) & set(path[:-1]) else ""
        if _is_secret(name, node):
            yield ".".join(path)


def _is_secret(name: str, value: str) -> bool:
    secret = bool(name and masking.SECRET.search(name)) or bool(masking.SECRET_VALUE.search(value))
    return bool(value) and (secret or bool(PASSWORD.search(value)))
