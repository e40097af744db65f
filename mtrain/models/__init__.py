"""Models, written once for all frameworks on ``core.nn`` and ``core.ops``; none of them imports a framework."""
