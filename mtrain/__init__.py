"""One YAML spec, any training backend.

Importing ``mtrain`` imports no framework: torch and paddle are loaded by a rank, one per process, once it knows its backend.
"""

__version__ = "0.1.0"
