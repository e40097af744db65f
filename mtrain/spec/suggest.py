"""The nearest valid word, for messages that answer a misspelt one."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like ``word``, case and ``-``/``_`` aside; None when none is alike, or none but ``word`` itself."""

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    scored = [
        (SequenceMatcher(None, plain(word), plain(candidate)).ratio(), candidate)
        for candidate in known
        if candidate != word
    ]
    score, best = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return best if score >= 0.6 else None


def hint(word: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or the known words when none is alike: the end of a message."""
    words = sorted(known)
    best = closest(word, words)
    if best is not None:
        return f"; did you mean {best!r}?"
    return f"; known: {', '.join(words)}" if words else "; nothing is expected here"
