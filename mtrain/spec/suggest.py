"""Find the valid word that is most similar to a misspelt one, for error messages."""

from collections.abc import Iterable


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to ``word``; None if none is similar.

    Case and the difference of ``-`` and ``_`` are ignored. ``word`` itself is never returned.
    """

    def plain(text: str) -> str:
        return text.lower().replace("-", "_")

    def likeness(text: str) -> float:
        from difflib import SequenceMatcher  # the help of all verbs needs none

        return SequenceMatcher(None, plain(word), text).ratio()

    def likeness_of_parts(text: str) -> float:
        parts = text.split("_")
        is_abbreviated = len(parts) > 1 and plain(word) == "".join(part[:1] for part in parts)
        return 1.0 if is_abbreviated else max(map(likeness, parts))

    others = [candidate for candidate in candidates if candidate != word]
    # A part is compared only if no candidate is similar as a whole: ``rate`` and ``lr`` stand for ``learning_rate``.
    for measure, least in ((likeness, 0.6), (likeness_of_parts, 0.8)):
        score, best = max(
            ((measure(plain(other)), other) for other in others), key=lambda pair: pair[0], default=(0.0, "")
        )
        if score >= least:
            return best
    return None


def hint(word: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message: ``; did you mean 'x'?``, or all candidates if none is similar to ``word``."""
    words = sorted(candidates)
    best = closest(word, words)
    if best is not None:
        return f"; did you mean {best!r}?"
    return f"; known: {', '.join(words)}" if words else "; nothing is expected here"
