"""Environment variables of mtrain that are no values of a spec. Agents and ranks know them without reading one."""

JOB_SECRET = "MTRAIN_JOB_SECRET"  # noqa: S105
"""Environment variable in which the starter passes the job's secret to the ranks. No plan, file or log contains it."""
JOB_ATTEMPT = "MTRAIN_JOB_ATTEMPT"
"""Environment variable that tells a rank to which attempt of its job it belongs, see ``system/attempts.py``."""
CLUSTER_SECRET = "MTRAIN_CLUSTER_SECRET"  # noqa: S105
"""Environment variable with the secret that hosts share if people start them by hand. Ranks do not receive it."""
TRACING = frozenset({"MTRAIN_TRACE", *(f"MTRAIN_TRACE_{name}" for name in ("EVERY", "AT", "NUDGE", "UPDATES"))})
"""Variables of ``mtrain_trace.recorder``, which that sets in the environment of a job that it records."""
RESERVED = frozenset({"MTRAIN_HOME", "MTRAIN_DEBUG", "MTRAIN_CACHE", JOB_SECRET, JOB_ATTEMPT, CLUSTER_SECRET}) | TRACING
"""Environment variables that begin like values of a spec and are none."""
