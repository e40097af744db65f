"""Clean the caller's environment for ranks, select the variables for other hosts, and mask secrets in files."""

import os
import re
from collections.abc import Iterable, Mapping

from mtrain.errors import UsageError
from mtrain_trace.masking import PASSWORD_IN_URL, SECRET, SECRET_VALUE

STALE = re.compile(
    r"^(PADDLE_|PET_|HOROVOD_|OMPI_|PMI_|PMIX_|TORCHELASTIC_|DEEPSPEED_|DS_|FLAGS_selected_|GROUP_|ROLE_)"
    r"|^(MASTER_|GLOO_SOCKET_|MTRAIN_[A-Z]+__)"
    r"|^(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|CROSS_RANK|CROSS_SIZE|TRAINER_ENDPOINTS|DISTRIBUTED_TRAINER_ENDPOINTS"
    r"|POD_IP|POD_NAME|PORT_RANGE|COLLECTIVE_MASTER_IP|FLAGS_START_PORT|FLAGS_FIXED_PORT|FLAGS_stop_check_timeout"
    r"|MTRAIN_JOB_SECRET|MTRAIN_JOB_ATTEMPT|MTRAIN_CLUSTER_SECRET|OMP_NUM_THREADS|MKL_NUM_THREADS|OPENBLAS_NUM_THREADS|OMP_WAIT_POLICY)$"
)
"""Names of variables by which starters tell a rank its number and peers, or which a plan sets itself.

They are removed from the caller's environment, because another job may have left them there; only the plan sets
them."""
FORWARDED = re.compile(
    r"^(NCCL_|RCCL_|GLOO_|UCX_|FI_|IBV_|MLX5_|CUDA_|CUBLAS_|CUDNN_|HIP_|ROCR_|HSA_|XLA_|TORCH_|TORCHINDUCTOR_|PYTORCH_|AOTI_|FLAGS_"
    r"|KMP_|OMP_|MKL_|ONEDNN_|DNNL_|ATEN_|TRITON_|LC_)"
    r"|^(PYTHONPATH|PYTHONHASHSEED|PYTHONWARNINGS|PYTHONFAULTHANDLER|PYTHONDEVMODE|PYTHONUTF8|LD_LIBRARY_PATH|LANG|TZ|MTRAIN_DEBUG|MTRAIN_TRACE\w*"
    r"|MALLOC_ARENA_MAX|MALLOC_MMAP_THRESHOLD_|MALLOC_TRIM_THRESHOLD_)$"
)
"""Names of variables that are sent to other hosts: settings of Python and of the libraries that train.

A host keeps its own values of all others, such as PATH and HOME. ``cluster.forward_env`` adds names."""
PLACE = re.compile(
    r"^(LC_|LANG|VIRTUAL_ENV|CONDA_|SLURM_|SBATCH_|PBS_|LSB_|SGE_|GOMP_)"
    r"|^(PATH|HOME|USER|LOGNAME|SHELL|PWD|TERM|TMPDIR|TZ|HOSTNAME|HOST|DISPLAY|COLUMNS|LINES|SHLVL|DEBIAN_FRONTEND"
    r"|LD_PRELOAD|GLIBC_TUNABLES|CI|NO_PROXY|no_proxy|PORT_RANGE|PYTHON[A-Z]+)$"
)
"""Names of variables that describe the place of a process and its interpreter, and never hold a secret."""
TUNABLES = "GLIBC_TUNABLES"
"""Variable with the settings of glibc, as ``name=value`` with colons between them."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\*?")


def caller() -> dict[str, str]:
    """Return an unchanged copy of this process's environment."""
    return dict(os.environ)


def set_defaults(values: Mapping[str, str]) -> None:
    """Set variables of this process that have no value, for a library that reads them."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def join_variables(environ: Mapping[str, str], planned: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the variables of a plan, which win; but glibc's tunables are joined, and the caller's win."""
    env = {**environ, **planned}
    if environ.get(TUNABLES) and TUNABLES in planned:
        env[TUNABLES] = f"{planned[TUNABLES]}:{environ[TUNABLES]}"  # of two values for one name glibc takes the last
    return env


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables that only the plan may set for ranks."""
    return {name: value for name, value in environ.items() if not STALE.search(name)}


def forward(environ: Mapping[str, str], extra: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of ``environ`` for ranks on other hosts: names of ``FORWARDED``, and those of ``extra``.

    ``extra`` holds names, or ``NAME*`` for all names with that beginning; names that are not set here are left out. A
    variable whose name looks secret is sent only if ``extra`` holds its full name.

    Raises:
        UsageError: ``extra`` holds something that is not a name, or a name that only the plan may set.
    """
    requested = list(extra)
    for name in requested:
        if not NAME.fullmatch(name):
            raise UsageError(f"cluster.forward_env: {name!r} is no name of an environment variable; give NAME or NAME*")
        if STALE.search(name):
            raise UsageError(f"cluster.forward_env: {name} tells a rank who it is; only the plan sets it, leave it out")
    prefixes = tuple(name[:-1] for name in requested if name.endswith("*"))

    def is_sent(name: str) -> bool:
        matches = bool(FORWARDED.search(name) or name.startswith(prefixes))
        return name in requested or (matches and not SECRET.search(name))

    return {name: value for name, value in clean(environ).items() if is_sent(name)}


def redacted_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command with its secrets masked, for a file that people pass on.

    Masked are values of names that look secret, in ``NAME=VALUE`` and after ``--name``, and passwords in URLs.
    """
    masked: list[str] = []
    secret_follows = False
    for word in words:
        name, equals, value = word.partition("=")
        if equals and (SECRET.search(name) or SECRET_VALUE.search(value)):
            masked.append(f"{name}=***")
        else:
            is_secret = secret_follows or SECRET_VALUE.search(word)
            masked.append("***" if is_secret else PASSWORD_IN_URL.sub("://***@", word))
        secret_follows = word.startswith("--") and not equals and SECRET.search(word) is not None
    return masked


def harmless(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose names are known to hold settings, without those that look secret nevertheless."""
    return {
        name: value
        for name, value in environ.items()
        if _is_known(name) and not _looks_secret(name, value) and not PASSWORD_IN_URL.search(value)
    }


def redact(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a file that people pass on, with ``***`` for values that are not known to be harmless."""
    # A secret cannot be recognised by its value, and often not by its name. So only values of names that are known to be
    # harmless are shown, instead of all values that do not look secret.
    return {
        name: PASSWORD_IN_URL.sub("://***@", value) if _is_known(name) and not _looks_secret(name, value) else "***"
        for name, value in sorted(environ.items())
    }


def _is_known(name: str) -> bool:
    return bool(FORWARDED.search(name) or PLACE.search(name))


def _looks_secret(name: str, value: str) -> bool:
    return bool(SECRET.search(name) or SECRET_VALUE.search(value))
