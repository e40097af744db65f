"""The backend ``fsdp`` on torch's FSDP2 (``torch.distributed.fsdp.fully_shard``)."""
