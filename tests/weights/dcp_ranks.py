"""One of several ranks that save or load a folder of ``torch.distributed.checkpoint``: ``python -m tests.weights.dcp_ranks RANK
SIZE WHAT FOLDER``, in a folder with the Llama ``llama`` of transformers."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


class Stateful:
    """What users wrap their state in."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Trainer(nn.Module):
    """A class around the model."""

    def __init__(self, model):
        super().__init__()
        self.net = model


def forms(model, wrapped, optimizer):
    """The states that people save."""
    weights, moments = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    flat = {
        **weights,
        "optimizer": moments,
        "train_state": Stateful({"step": torch.tensor(3)}),
        "lr_scheduler": {"last": 1},
    }
    return {
        "plain": dict(weights),
        "model": {"model": weights, "optim": moments, "step": 3},
        "app": {"app": Stateful({"model": weights, "optim": moments})},
        "flat": flat,
        "around": {"model": get_model_state_dict(wrapped)},
        "compiled": {"model": {name.replace("self_attn.", "_orig_mod.self_attn."): x for name, x in weights.items()}},
        "module": {f"module.{name}": x for name, x in weights.items()},
        "optimizer": {"optim": moments},
    }


def main():
    rank, size, what, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/met-{what}-{size}", rank=rank, world_size=size)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained("llama", dtype=torch.float32)
    wrapped = Trainer(model)
    if what == "load":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    if what == "save":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        model(input_ids=torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
        for name, state in forms(model, wrapped, optimizer).items():
            dcp.save(state, checkpoint_id=f"{folder}/{name}")
    else:
        state = model.state_dict()
        dcp.load(state, checkpoint_id=folder)
        logits = model(input_ids=torch.arange(8)[None]).logits
        if rank == 0:
            torch.save(logits.detach(), "logits.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of the library are not waited for
