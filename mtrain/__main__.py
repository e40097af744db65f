"""``python -m mtrain``."""

import sys

from mtrain.commands import main

if __name__ == "__main__":
    sys.exit(main())
