"""Meshes that share the layers of a model: tensor groups, stages of a pipeline, and what a plan says of them."""
