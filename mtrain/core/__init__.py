"""Backend-agnostic core: seams, spec, loop, checkpoints, plans. No framework, no backend, nothing of detection."""
