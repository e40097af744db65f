"""Find the valid word that is most similar to a misspelt one, for error messages."""

from collections.abc import Iterable
from difflib import SequenceMatcher


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to ``word``; None if none is similar.

    Case and the difference of ``-`` and ``_`` are ignored. ``word`` itself is never returned.
    """

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    scored = [
        (SequenceMatcher(None, plain(word), plain(candidate)).ratio(), candidate)
        for candidate in candidates
        if candidate != word
    ]
    score, best = max(scored, key=lambda pair: pair[0], default=(0.0, ""))
    return best if score >= 0.6 else None


def hint(word: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message: ``; did you mean 'x'?``, or all candidates if none is similar to ``word``."""
    words = sorted(candidates)
    best = closest(word, words)
    if best is not None:
        return f"; did you mean {best!r}?"
    return f"; known: {', '.join(words)}" if words else "; nothing is expected here"
