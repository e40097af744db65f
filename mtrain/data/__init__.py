"""Decode and prepare images for every task: image operations and the loader. No module here imports a framework."""
