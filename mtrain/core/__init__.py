"""Training without any framework, backend or task: interfaces, the training loop, and what it needs."""
