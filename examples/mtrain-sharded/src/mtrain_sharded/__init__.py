"""An example of a backend outside of mtrain, on torch's ``fully_shard``."""
