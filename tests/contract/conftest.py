"""One rank's results computed here; more ranks started once each through the backend's own starter."""

import sys
from pathlib import Path

# Ranks and tests share modules of this folder.
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT)) if str(ROOT) not in sys.path else None
