"""Which tests of other projects are run, where they are found, and how each side starts them."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

CHECKOUTS = Path(os.environ.get("REFEREES", "referees")).absolute()
BIN = Path(sys.executable).parent
RANKS = 2
HOROVODRUN = (str(BIN / "horovodrun"), "-np", str(RANKS), sys.executable)


def torchrun(ranks: int = RANKS) -> tuple[str, ...]:
    """The command that runs a script under torchrun, on a port that nobody else has."""
    words = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", str(ranks))
    return (str(BIN / "torchrun"), *words)


def mtrain(*words: str, ranks: int = RANKS) -> tuple[str, ...]:
    """The command that runs a script under mtrain."""
    return (str(BIN / "mtrain"), "run", "--quiet", "--nproc-per-node", str(ranks), *words)


@dataclass(frozen=True)
class Script:
    """A test that is a whole script: its exit code is its outcome."""

    name: str
    path: str  # below the package or the checkout; without a folder: an adapter of this folder
    theirs: tuple[str, ...] = field(default_factory=torchrun)  # (): the adapter has both sides
    ours: tuple[str, ...] = field(default_factory=mtrain)
    words: tuple[str, ...] = ()
    result: str = ""  # a file that it writes in its folder, and which must be the same on both sides

    def file(self) -> str:
        """The script's path."""
        package, _, rest = self.path.partition("/")
        return str(found(package) / rest if rest else Path(__file__).with_name(self.path))


@dataclass(frozen=True)
class Suite:
    """Unit tests that every rank of a job runs."""

    path: str  # of the file; `torch`: of PyTorch's wheel
    theirs: tuple[str, ...]  # (): the tests have both sides
    ours: tuple[str, ...]
    ranks: int = RANKS

    def loader(self) -> str:
        """What on_ranks.py gets."""
        package, _, rest = self.path.partition("/")
        own = Path(__file__).parent / self.path
        return str(found(package) / rest) if rest else str(own) if own.exists() else self.path

    def names(self) -> list[str]:
        """The tests, in the order of their names."""
        argv = [sys.executable, str(Path(__file__).with_name("on_ranks.py")), self.loader()]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


@dataclass(frozen=True)
class Referee:
    """A project whose tests judge mtrain."""

    name: str
    distribution: str
    work: tuple[Script, ...] | Suite
    environ: dict[str, str] = field(default_factory=dict)
    checkout: bool = False

    def missing(self) -> str | None:
        """Why it cannot be run here."""
        if importlib.util.find_spec(self.distribution) is None:
            return f"{self.distribution} is not installed"
        if self.checkout and not (CHECKOUTS / self.name).is_dir():
            return f"no checkout at {CHECKOUTS / self.name}: give its parent folder as REFEREES"
        return None

    def version(self) -> str:
        """The version of the package that was judged or judges."""
        return importlib.metadata.version(self.distribution)


def found(name: str) -> Path:
    """The folder of an installed package, or of a checkout below REFEREES."""
    checkout = CHECKOUTS / name
    if checkout.is_dir():
        return checkout
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else checkout


ACCELERATE = "accelerate/test_utils/scripts/"
REFEREES = (
    Referee(
        "accelerate",
        "accelerate",
        tuple(
            Script(name, f"{ACCELERATE}test_{name}.py")
            for name in ("ops", "sync", "script", "distributed_data_loop", "merge_weights", "ddp_comm_hook")
        ),
        environ={"ACCELERATE_USE_CPU": "1"},  # Without it each rank without a GPU trains alone, under torchrun too.
    ),
    Referee(
        "lightning",
        "lightning_fabric",
        tuple(
            Script(f"parity_fabric, ddp, {ranks} ranks", "fabric_parity.py", theirs=(), ours=mtrain(ranks=ranks))
            for ranks in (2, 3)
        ),
        checkout=True,
    ),
    Referee(
        "random cases",
        "torchmetrics",
        Suite("hard_cases.py", theirs=(), ours=(sys.executable,), ranks=1),
        environ={"RANK": "0"},
    ),
    Referee(
        "DeepSpeed",
        "deepspeed",
        Suite("deepspeed_units.py", torchrun(), mtrain("-b", "deepspeed")),
        # Who compiles waits without end for a lock that a killed process has left in the user's own folder.
        environ={"TORCH_EXTENSIONS_DIR": str(CHECKOUTS / "torch_extensions")},
        checkout=True,
    ),
    Referee(
        "transformers",
        "transformers",
        (
            *(
                Script(
                    name,
                    f"transformers/tests/trainer/distributed/scripts/{name}.py",
                    words=("--output_dir", ".", "--use_cpu", "True", "--report_to", "none"),
                    result="losses.json" if name == "training_parity" else "",
                )
                for name in ("training_parity", "worker_seed", "dispatch_batches", "eval_ddp")
            ),
            *(
                Script(f"train, {name}", "trainer_cases.py", words=(name,), result="losses.json")
                for name in ("train", "clip", "accumulate", "resume", "eval", "bf16")
            ),
            *(
                Script(f"as a spec, {name}", "trainer_cases.py", (), (sys.executable,), words=("spec", name))
                for name in ("train", "clip", "accumulate")
            ),
        ),
        checkout=True,
    ),
    Referee(
        "trainer",
        "jsonschema",
        Suite("kubeflow_manifests.py", theirs=(), ours=(sys.executable,), ranks=1),
        environ={"RANK": "0"},
        checkout=True,
    ),
    Referee("torch", "torch", Suite("torch", torchrun(4), mtrain(ranks=4), ranks=4)),
    Referee(
        "horovod",
        "horovod",
        Suite("horovod/test/parallel/test_torch.py", HOROVODRUN, mtrain("-b", "horovod")),
        checkout=True,
    ),
)
