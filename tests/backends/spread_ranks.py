"""One rank of the tests of spread models: ``spread_ranks BACKEND MODELS``, in the variables of a job.

A mesh is named as in ``fsdp:tensor=2:pipeline=2:sequence``; ranks that remain are shards.
"""

import gc
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from mtrain.backends._torch.sharded import spread
from mtrain.backends.deepspeed import DeepSpeed
from mtrain.backends.fsdp import Fsdp
from mtrain.core.interfaces import Mesh, Recipe
from mtrain.errors import SpecError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


class Own(nn.Module):
    """A module whose own start values overwrite parts of those of its children, read others, and copy layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
        self.linear = nn.Linear(33, 31)
        self.embedding = nn.Embedding(50, 32, padding_idx=3)
        self.given = nn.Parameter(torch.from_numpy(np.ones((40, 9), np.float32)))
        self.register_buffer("noise", torch.randn(100, 10))
        nn.init.orthogonal_(self.linear.weight)
        row = self.embedding.weight[2:4]
        with torch.no_grad():
            self.encoder.layers[0].linear1.weight.mul_(0.5)
            self.encoder.layers[1].linear1.weight[3:5].fill_(1)
            nn.init.trunc_normal_(self.encoder.layers[1].linear2.weight, std=0.02)
            row.add_(1)
            self.given[0] = float(self.encoder.layers[0].linear1.weight.sum())
            self.given[1] = self.encoder.layers[0].linear2.weight[0].tolist()[3]
            self.given[2] = float(self.encoder.layers[0].self_attn.in_proj_weight.numpy()[5].sum())


class Shared(nn.Module):
    """A module whose arrays lie in the memory of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(40, 9))
        self.second = nn.Parameter(torch.empty(0))
        self.second.data = self.first.data
        self.third = nn.Parameter(torch.randn(40, 9))
        self.register_buffer("seen", self.third.data[:4])
        self.fourth = nn.Parameter(torch.randn(40, 9))
        self.view = self.fourth.data[3:5]
        self.copy = self.view.clone()
        self.total = 0.0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.fourth, DTensor) and self.fourth.numel():
            self.total = float(self.fourth.detach().sum())
        return super().state_dict(*args, **kwargs)


def check_shared(model: Shared) -> None:
    """Check that what is no weight kept its values, and that each weight has memory of its own."""
    assert torch.equal(model.view, model.copy)
    first, second = (x.to_local().untyped_storage().data_ptr() for x in (model.first, model.second))  # type: ignore[operator]
    assert first != second
    assert model.total, "the state is taken while weights are not split"


class Uneven(nn.Module):
    """A module of which the first rank alone prints something while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(9))
        if sys.argv[-1] == "uneven" and os.environ["RANK"] == "0" and dist.is_initialized():
            print(self.layers[4].weight)


class Loaded(nn.Module):
    """A module whose weights are read from files, array by array and mapped into memory."""

    folder = ""
    """Where the files are."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(9))
        with safe_open(f"{self.folder}/one.safetensors", framework="pt") as file, torch.no_grad():
            for name, x in self.layers.state_dict().items():
                x.copy_(file.get_tensor(name))
        self.layers[2:5].load_state_dict(torch.load(f"{self.folder}/two.pt", mmap=True))

    @classmethod
    def write(cls, folder: str) -> None:
        """Write the files."""
        draws, cls.folder = np.random.default_rng(3), folder
        arrays = {f"{i}.weight": draws.standard_normal((40, 40), dtype=np.float32) for i in range(9)}
        arrays |= {f"{i}.bias": draws.standard_normal(40, dtype=np.float32) for i in range(9)}
        save_file(arrays, f"{folder}/one.safetensors")
        torch.save(
            {name: torch.from_numpy(arrays[name] + 1) for name in arrays if name[0] in "012"}, f"{folder}/two.pt"
        )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=65, num_key_value_heads=2, bos_token_id=None, eos_token_id=None, **SIZES)
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=65, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None)
    )


def even() -> nn.Module:
    return language({})


def odd() -> nn.Module:
    """Return a model whose vocabulary does not divide among two ranks."""
    return language({"vocab_size": 65})


def tied() -> nn.Module:
    return language({"tie_word_embeddings": True})


def lora() -> nn.Module:
    """Return a model of which low-rank adapters are trained."""
    import peft

    model = language({})
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "down_proj"])
    return peft.inject_adapter_in_model(config, model)


def language(settings: dict[str, Any]) -> nn.Module:
    """Return a Llama as mtrain trains it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mtrain_language import network

    sizes = {**SIZES, "vocab_size": 64, "num_key_value_heads": 2, **settings}
    return network.adapt(LlamaForCausalLM(LlamaConfig(bos_token_id=None, eos_token_id=None, **sizes)), path="here")


def mesh_of(name: str, ranks: int) -> Mesh | None:
    """Return the mesh in the name of a backend; None: it names none."""
    _, *values = name.split(":")
    lengths = {key: int(length) for key, _, length in (value.partition("=") for value in values) if length}
    if not values:
        return None
    others = {"replicate": 1, "tensor": 1, "shard": ranks // int(np.prod(list(lengths.values())))}
    return Mesh(**{**others, **lengths}, sequence="sequence" in values)  # type: ignore[arg-type]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "own": Own,
    "shared": Shared,
    "uneven": Uneven,
    "loaded": Loaded,
    "llama": llama,
    "gpt2": gpt2,
    "even": even,
    "odd": odd,
    "tied": tied,
    "lora": lora,
}


def digest(arrays: Any) -> str:
    """Return the digest of named arrays."""
    taken = hashlib.sha256()
    for name, x in arrays.items():
        taken.update(f"{name} {x.shape} {x.dtype}".encode() + np.ascontiguousarray(x).tobytes())
    return taken.hexdigest()


def plain(name: str, *, double: bool) -> str:
    """Return the digest of a model that is built without any backend."""
    torch.manual_seed(7)
    model = MODELS[name]()
    state = (model.double() if double else model).state_dict()
    return digest({key: x.numpy() for key, x in state.items()})


def check_own_optimizer(session: Any, mesh: Mesh | None) -> None:
    """Check that a script's own optimizer can read weights, has its state in parts, and that whole arrays are refused later."""
    wanted, seen = plain("uneven", double=False), []

    def made(model: nn.Module) -> torch.optim.Optimizer:
        seen.append(float(sum(x.detach().clone().sum() for x in model.parameters())))
        several = [x for x in model.parameters() if x.dim() > 1]
        groups = [{"params": several}, {"params": [x for x in model.parameters() if x.dim() == 1], "lr": 0.2}]
        return torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.25)

    recipe = Recipe(
        rule="sgd",
        groups=(("", {}),),
        micro_batch=1,
        seed=7,
        own_model=True,
        ema_decay=0.9,
        native_optimizer=made,
        mesh=mesh,
    )
    model, optimizer = session.prepare(Uneven, recipe)
    state = session.state(model, optimizer)
    assert digest(state.weights) == digest(state.ema) == wanted
    assert seen
    (sums,) = {key.partition("/")[0] for key, x in state.moments.items() if x.ndim}
    moments = {name: state.moments[f"{sums}/{name}"] for name in state.weights}
    assert all(x.shape == state.weights[name].shape and (x == 0.25).all() for name, x in moments.items())
    try:
        model.load_state_dict({name: torch.zeros(x.shape) for name, x in state.weights.items()})
    except SpecError as error:
        print("refused", str(error).partition(" given")[0])


def main(backend: str, *names: str) -> None:
    """Build each model in a session, and compare; small arrays are spread too."""
    spread.LEAST_BYTES, spread.ROOM_BYTES = 64, 6000
    torch.set_num_threads(1)
    expected = {(x, double): plain(x, double=double) for x in names if x in MODELS for double in (False, True)}
    used: list[int] = []
    give_up, fill = spread.Spread._give_up, spread.Spread._fill
    whole: list[int] = []

    def counted(of: spread.Spread, memory: Any) -> None:
        used.append(memory.number)
        give_up(of, memory)

    def measured(of: spread.Spread, memory: Any, *, values: bool = True) -> None:
        fill(of, memory, values=values)
        whole.append(sum(x.size for x in of._by_number.values() if x.part is None))

    spread.Spread._give_up = counted  # type: ignore[method-assign]
    spread.Spread._fill = measured  # type: ignore[method-assign]
    made = (
        DeepSpeed(DeepSpeed.Options(device="cpu", stage=3))
        if backend == "deepspeed"
        else Fsdp(Fsdp.Options(device="cpu"))
    )
    with made as session:
        for (name, double), wanted in expected.items():
            recipe = Recipe(
                rule="adamw",
                groups=(("", {}),),
                micro_batch=1,
                seed=7,
                own_model=True,
                ema_decay=0.9,
                precision="fp64" if double else "fp32",
                mesh=mesh_of(backend, session.collective.size),
            )
            used.clear()
            whole.clear()
            model, optimizer = session.prepare(MODELS[name], recipe)
            state = session.state(model, optimizer)
            assert digest(state.weights) == wanted, f"{name} {double}"
            assert digest(state.ema) == wanted or name in ("own", "lora"), f"{name} {double}"
            assert len(used) > (3 if name == "shared" else 20), f"{name}: {len(used)} arrays were given up"
            largest = max(x.nbytes for x in state.weights.values())
            assert max(whole) <= spread.ROOM_BYTES + 3 * largest, f"{name}: {max(whole)} bytes were whole at a time"
            if isinstance(model, Shared) and backend == "fsdp":
                check_shared(model)
            del model, optimizer, state
            gc.collect()
            print("same", name, double, flush=True)
        if names[-1] == "own optimizer":
            check_own_optimizer(session, mesh_of(backend, session.collective.size))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as written:
        Loaded.write(written)
        main(*sys.argv[1:])
