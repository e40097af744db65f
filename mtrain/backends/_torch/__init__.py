"""What solo, ddp, horovod and deepspeed share: torch's layers, functions and engine."""
