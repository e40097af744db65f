"""The last message that a leader sends to the agent of a host: how the job ended, or why it was refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtrain.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Farewell:
    """How a job ended, for the process that serves it on another host."""

    code: int
    """Exit code of the job."""
    text: str = ""
    """What that process prints before it exits."""
    reason: str = ""
    """Why the job failed, in one line; empty: it did not, or this is not known."""
    refusal: str | None = None
    """Why this host was refused or nothing was started, without the ``error:`` that ``text`` begins with; None:
    neither."""
    discard: bool = False
    """Whether the host deletes its run folder."""

    @classmethod
    def for_refusal(cls, reason: str) -> "Farewell":
        """Return the farewell to a host that is refused, or whose job was not started."""
        return cls.for_error(reason, code=UsageError.exit_code)

    @classmethod
    def for_error(cls, reason: str, *, code: int) -> "Farewell":
        """Return the farewell after an error of the leader.

        It is a refusal where ``code`` is that of a ``UsageError``.
        """
        refusal = reason if code == UsageError.exit_code else None
        return cls(code=code, text=f"error: {reason}", reason=next(iter(reason.splitlines()), ""), refusal=refusal)

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> "Farewell":
        """Read a farewell from a ``bye`` message; every field may be missing."""
        refusal = message.get("refusal")
        return cls(
            code=int(message.get("code", 0)),
            text=str(message.get("text", "")),
            reason=str(message.get("reason", "")),
            refusal=None if refusal is None else str(refusal),
            discard=bool(message.get("discard")),
        )

    def message(self) -> dict[str, Any]:
        """Return the ``bye`` message.

        ``text`` is in it also for a refusal: hosts with another version of mtrain print it.
        """
        refusal = {} if self.refusal is None else {"refusal": self.refusal}
        fields = {"code": self.code, "text": self.text, "reason": self.reason, "discard": self.discard}
        return {"do": "bye", **fields, **refusal}
