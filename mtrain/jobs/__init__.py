"""A job on one host: its plan, its preflight checks, and the supervisor that runs it."""
