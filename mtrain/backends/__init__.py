"""Ways of training on many ranks; each module is the target of one `mtrain.backends` entry point."""
