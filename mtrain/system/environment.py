"""The caller's environment: cleaned of what another job may have left in it, cut down for other hosts, masked for files."""

import os
import re
from collections.abc import Iterable, Mapping

from mtrain.errors import UsageError

STALE = re.compile(
    r"^(PADDLE_|PET_|HOROVOD_|OMPI_|PMI_|PMIX_|TORCHELASTIC_|DEEPSPEED_|DS_|FLAGS_selected_|GROUP_|ROLE_)"
    r"|^(MASTER_|GLOO_SOCKET_|MTRAIN_[A-Z]+__)"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|CROSS_RANK|CROSS_SIZE|TRAINER_ENDPOINTS|DISTRIBUTED_TRAINER_ENDPOINTS"
    r"|POD_IP|POD_NAME|PORT_RANGE|COLLECTIVE_MASTER_IP|FLAGS_START_PORT|FLAGS_FIXED_PORT|FLAGS_stop_check_timeout"
    r"|MTRAIN_JOB_SECRET|MTRAIN_CLUSTER_SECRET|OMP_NUM_THREADS|MKL_NUM_THREADS|OPENBLAS_NUM_THREADS|OMP_WAIT_POLICY)$"
)
"""Names that starters use to tell a rank who it is, or that a plan sets itself: only the plan may say these things."""
FORWARDED = re.compile(
    r"^(NCCL_|RCCL_|GLOO_|UCX_|FI_|IBV_|MLX5_|CUDA_|CUBLAS_|CUDNN_|HIP_|ROCR_|HSA_|XLA_|TORCH_|TORCHINDUCTOR_|PYTORCH_|AOTI_|FLAGS_"
    r"|KMP_|OMP_|MKL_|ONEDNN_|DNNL_|ATEN_|TRITON_|LC_)"
    r"|^(PYTHONPATH|PYTHONHASHSEED|PYTHONWARNINGS|PYTHONFAULTHANDLER|PYTHONDEVMODE|PYTHONUTF8|LD_LIBRARY_PATH|LANG|TZ|MTRAIN_DEBUG"
    r"|MALLOC_ARENA_MAX|MALLOC_MMAP_THRESHOLD_|MALLOC_TRIM_THRESHOLD_)$"
)
"""Names that another host is told: settings of the libraries that train, and of Python. Everything else, PATH and HOME
included, is that host's own. ``cluster.forward_env`` adds names."""
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|JWT|API_?KEY|ACCESS_?KEY|AUTH|COOKIE|SIGNATURE|DSN$|_PWD$|_PASS$|_KEY$"
    r"|SESSION_ID|WEBHOOK|CONNECTION_STRING",
    re.IGNORECASE,
)
"""Names whose values nobody should read."""
SECRET_VALUE = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY|\b(?:gh[a-z]_|github_pat_|glpat-|hf_|sk-|xox[a-z]-|AKIA|ASIA)[A-Za-z0-9_-]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.|\b(?:bearer|basic) +[\w.~+/=-]{8,}|\b(?:password|passwd|pwd|token|secret|api_?key)=[^\s&;]+",
    re.IGNORECASE,
)
"""Values that are secrets whatever their name: keys of well-known services, web tokens, parts of connection strings."""
PLACE = re.compile(
    r"^(LC_|LANG|VIRTUAL_ENV|CONDA_|SLURM_|SBATCH_|PBS_|LSB_|SGE_|GOMP_)"
    r"|^(PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|TMPDIR|TZ|HOSTNAME|HOST|DISPLAY|COLUMNS|LINES|SHLVL|DEBIAN_FRONTEND"
    r"|LD_PRELOAD|GLIBC_TUNABLES|CI|NO_PROXY|no_proxy|PORT_RANGE|PYTHON[A-Z]+)$"
)
"""Names that say where a process runs and how its interpreter works, and that people put no secret into."""
PASSWORD_IN_URL = re.compile(r"://\S*@")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")


def caller() -> dict[str, str]:
    """A copy of this process's environment, as it is."""
    return dict(os.environ)


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without what the ranks must hear from the plan alone."""
    return {name: value for name, value in environ.items() if not STALE.search(name)}


def forwarded(environ: Mapping[str, str], extra: Iterable[str] = ()) -> dict[str, str]:
    """What of ``environ`` the ranks on another host are told: the names of ``FORWARDED``, and those of ``extra``.

    A name that looks secret is told only where ``extra`` names it in full. ``extra``: names, ``NAME*`` for all that begin
    so; what is not set here is left out.

    Raises:
        UsageError: ``extra`` holds what is no name, or a name that only the plan may set.
    """
    asked = list(extra)
    for name in asked:
        if not NAME.fullmatch(name):
            raise UsageError(f"cluster.forward_env: {name!r} is no name of an environment variable; give NAME or NAME*")
        if STALE.search(name):
            raise UsageError(f"cluster.forward_env: {name} tells a rank who it is; only the plan sets it, leave it out")
    prefixes = tuple(name[:-1] for name in asked if name.endswith("*"))

    def told(name: str) -> bool:
        return name in asked or (bool(FORWARDED.search(name) or name.startswith(prefixes)) and not SECRET.search(name))

    return {name: value for name, value in cleaned(environ).items() if told(name)}


def redacted_words(words: Iterable[str]) -> list[str]:
    """A command for such a file: values of what looks secret, as ``NAME=VALUE`` or behind ``--name``, and passwords in URLs."""
    kept: list[str] = []
    follows = False
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (SECRET.search(name) or SECRET_VALUE.search(value)):
            kept.append(f"{name}=***")
        else:
            kept.append("***" if follows or SECRET_VALUE.search(word) else PASSWORD_IN_URL.sub("://***@", word))
        follows = word.startswith("--") and not equals and SECRET.search(word) is not None
    return kept


def harmless(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names are known to hold settings and no secrets, without those that look secret all the same."""
    return {
        name: value
        for name, value in environ.items()
        if _is_known(name) and not _looks_secret(name, value) and not PASSWORD_IN_URL.search(value)
    }


def redacted(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` for a file that people pass on: all names, and the values of those that are known to hold no secrets.

    A secret is told neither by its value nor, often, by its name; so a value is shown because its name is known, not
    because nothing is suspected.
    """
    return {
        name: PASSWORD_IN_URL.sub("://***@", value) if _is_known(name) and not _looks_secret(name, value) else "***"
        for name, value in sorted(environ.items())
    }


def _is_known(name: str) -> bool:
    return bool(FORWARDED.search(name) or PLACE.search(name))


def _looks_secret(name: str, value: str) -> bool:
    return bool(SECRET.search(name) or SECRET_VALUE.search(value))
