"""Backend-agnostic core: seams, spec, loop, checkpoints, plans. No framework, no backend, no kind of task."""
