"""Tests here share the small network of the contract tests."""

import sys
from pathlib import Path

# So that `tests.contract` can be imported.
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT)) if str(ROOT) not in sys.path else None
