"""Leave secrets out of what is written down: by the names of variables and flags, and by values that are secret under any name."""

from __future__ import annotations

import re
from collections.abc import Sequence

SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|JWT|API[_-]?KEY|ACCESS[_-]?KEY|AUTH|COOKIE|SIGNATURE|DSN$"
    r"|[_-](PWD|PASS|KEY)$"
    r"|SESSION_ID|WEBHOOK|CONNECTION_STRING",
    re.IGNORECASE,
)
"""Names of variables whose values are probably secret."""
SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?:gh[a-z]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.|\b(?:bearer|basic) +[\w.~+/=-]{8,}|\b(?:password|passwd|pwd|token|secret|api_?key)=[^\s&;]+",
    re.IGNORECASE,
)
"""Values that are secret under any name: keys of well-known services, web tokens, parts of connection strings."""
PASSWORD_IN_URL = re.compile(r"://\S*@")
MASK = "***"


def mask_words(words: Sequence[str]) -> list[str]:
    """Return a command line without values that are probably secret, such as that of ``--api-key``."""
    shown: list[str] = []
    for word in words:
        name, is_assigned, _ = word.partition("=")
        # A flag and its value may be two words.
        before = shown[-1] if shown and shown[-1].startswith("-") and not word.startswith("-") else ""
        is_value = "=" not in before and SECRET.search(before)
        if is_assigned and SECRET.search(name):
            word = f"{name}={MASK}"
        elif is_value or SECRET_VALUE.search(word) or PASSWORD_IN_URL.search(word):
            word = MASK
        shown.append(word)
    return shown
