"""mtrain's own kernels for the CPU in C, used by backends of any framework. They are optional: see ``library.load``."""
