"""A job while it runs: its start, attempts, watched commands and verdict, and the metrics of its hosts."""
