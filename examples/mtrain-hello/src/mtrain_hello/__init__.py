"""A verb of mtrain's command line."""
