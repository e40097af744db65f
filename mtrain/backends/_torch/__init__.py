"""Layers, functions and the engine on torch, shared by the backends solo, ddp, horovod and deepspeed."""
