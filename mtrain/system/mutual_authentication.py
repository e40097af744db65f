"""Two ends of a connection prove to each other that they know one secret, without sending it.

Each end sends a fresh nonce, then an HMAC-SHA-256 of its role and of both nonces. The role keeps a proof from being
reflected to its sender, and the nonces keep it from being replayed later. This module does no input or output:
``cluster.handshake`` exchanges the four messages between hosts, ``backends._paddle.channel`` between ranks.
"""

import hmac
import secrets
from dataclasses import dataclass, field
from typing import Literal

NONCE_BYTES = 32
"""Random bytes of a nonce."""
Role = Literal["joins", "leads"]
"""The end that opens the connection joins; the end that listens leads."""


def seal(key: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA-256 of ``content``."""
    return hmac.digest(key, content, "sha256")


def _drawn_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class End:
    """One end of a connection; another one is made for every connection."""

    secret: bytes
    role: Role
    nonce: str = field(default_factory=_drawn_nonce)
    """Sent first. An end may put a name in front of the random part: its proof then covers that name."""

    def proof(self, their_nonce: str) -> str:
        """Return the proof that this end knows the secret, in hexadecimal."""
        return _proof(self.secret, self.role, self.nonce, their_nonce)

    def accepts(self, their_nonce: str, their_proof: str) -> bool:
        """Return whether the other end has proved that it knows the secret."""
        their_role: Role = "leads" if self.role == "joins" else "joins"
        expected = _proof(self.secret, their_role, their_nonce, self.nonce)
        return hmac.compare_digest(expected.encode(), their_proof.encode(errors="replace"))

    def session_key(self, their_nonce: str) -> bytes:
        """Return a key that only the two ends of this connection know, with which they can seal what follows."""
        joins, leads = (self.nonce, their_nonce) if self.role == "joins" else (their_nonce, self.nonce)
        return seal(self.secret, f"session {joins} {leads}".encode(errors="replace"))


def named_nonce(name: str) -> str:
    """Return a nonce for ``End`` with a name in front, separated by a colon."""
    return f"{name}:{_drawn_nonce()}"


def _proof(secret: bytes, role: Role, own: str, other: str) -> str:
    return seal(secret, f"{role} {own} {other}".encode(errors="replace")).hex()
