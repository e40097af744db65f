"""Which samples an update has, in which order: pure functions of seed, epoch and update."""
