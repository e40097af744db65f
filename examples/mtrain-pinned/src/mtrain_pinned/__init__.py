"""A launcher of mtrain that starts ranks directly, each on CPU cores of its own."""
