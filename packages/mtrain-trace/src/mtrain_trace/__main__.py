"""Run ``mtrain-trace`` as ``python -m mtrain_trace``."""

import sys

from mtrain_trace.command import main

sys.exit(main())
