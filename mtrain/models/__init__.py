"""Models, written once on ``core.nn`` and ``core.ops``; none of them knows a framework."""
