"""What backend ``horovod`` adds to the torch engine."""
