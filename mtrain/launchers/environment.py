"""The caller's environment, cleaned of what another job may have left in it."""

import os
import re
from collections.abc import Mapping

STALE = re.compile(
    r"^(PADDLE_|PET_|HOROVOD_|OMPI_|PMI_|PMIX_|TORCHELASTIC_|DEEPSPEED_|DS_|FLAGS_selected_|GROUP_|ROLE_)"
    r"|^(MASTER_|GLOO_SOCKET_|MTRAIN_[A-Z]+__)"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|CROSS_RANK|CROSS_SIZE|TRAINER_ENDPOINTS|DISTRIBUTED_TRAINER_ENDPOINTS"
    r"|POD_IP|POD_NAME|PORT_RANGE|COLLECTIVE_MASTER_IP|FLAGS_START_PORT|FLAGS_FIXED_PORT|FLAGS_stop_check_timeout"
    r"|OMP_NUM_THREADS|MKL_NUM_THREADS|OPENBLAS_NUM_THREADS|OMP_WAIT_POLICY)$"
)
"""Names that starters use to tell a rank who it is, or that a plan sets itself: only the plan may say these things."""
SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|API_?KEY|ACCESS_KEY|AUTH|COOKIE", re.IGNORECASE)


def caller() -> dict[str, str]:
    """A copy of this process's environment, as it is."""
    return dict(os.environ)


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what the ranks must hear from the plan alone."""
    return {name: value for name, value in environ.items() if not STALE.search(name)}


def redacted(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a file that people pass on: values that look secret, and passwords in URLs, are masked."""
    return {
        name: "***" if SECRET.search(name) else re.sub(r"://[^/@\s]+@", "://***@", value)
        for name, value in sorted(environ.items())
    }
