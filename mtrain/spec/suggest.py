"""Find the valid word that is most similar to a misspelt one, for error messages."""

from collections.abc import Iterable, Mapping

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "lr0", "base_lr"), ("learning_rate",)),
    **dict.fromkeys(("batch", "bs", "batch_size", "train_batch_size"), ("global_batch", "batch_size")),
    **dict.fromkeys(("grad_accum", "accumulate_grad_batches", "gradient_accumulation_steps"), ("accumulate",)),
    **dict.fromkeys(("max_norm", "grad_clip", "max_grad_norm", "gradient_clip_val"), ("clip_norm",)),
    **dict.fromkeys(("steps", "max_steps", "iters", "max_iters"), ("updates",)),
    **dict.fromkeys(("amp", "fp16", "bf16", "dtype"), ("precision",)),
    **dict.fromkeys(("imgsz", "img_size", "img"), ("image_size",)),
    **dict.fromkeys(("warmup_steps", "warmup_epochs", "warmup_ratio"), ("warmup",)),
    **dict.fromkeys(("output", "output_dir", "save_dir", "project", "to"), ("out", "dir")),
    "wd": ("weight_decay",),
    "model": ("build",),
    "max_epochs": ("epochs",),
    "num_workers": ("workers",),
    "collate_fn": ("collate",),
    "sampler": ("order",),
    "nproc_per_node": ("ranks",),
    "gradient_checkpointing": ("recompute",),
}
"""Names that other libraries give to an argument or a key -> its names here."""


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
    for known in OTHER_NAMES.get(plain(word), ()):
        if known in others:
            return known
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
