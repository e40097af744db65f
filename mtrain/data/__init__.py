"""Pictures for every task: decoding, geometry, colour, and the loader. Nothing here imports a framework."""
