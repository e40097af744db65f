"""Additions of backend ``horovod`` to the torch engine: Horovod's collectives, its exchange and its launchers."""
