"""Additions of backend ``deepspeed`` to the torch engine: DeepSpeed itself, and arrays split over ranks."""
