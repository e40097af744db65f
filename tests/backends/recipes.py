"""Recipes, a batch, and one update: what the tests of engines share."""

import math
from typing import Any

import numpy as np

from mtrain.core.interfaces import Rates, Recipe

BATCH = {"images": np.random.default_rng(0).normal(size=(6, 3, 8, 8)), "labels": np.arange(6) % 4}
LOUD = {**BATCH, "images": BATCH["images"] * math.inf}
OPTIONS = {
    "sgd": {"momentum": 0.9, "nesterov": 1.0},
    "adam": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "adamw": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "lamb": {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8},
    "lion": {"beta1": 0.9, "beta2": 0.99},
    "rmsprop": {"momentum": 0.9, "beta2": 0.99, "eps": 1e-8},
}


def recipe(rule: str = "sgd", **fields: Any) -> Recipe:
    """Two groups: biases without weight decay, and the rest with; float64 unless said otherwise."""
    options = OPTIONS[rule]
    groups = (("bias$", {**options, "weight_decay": 0.0}), ("", {**options, "weight_decay": 0.01}))
    values: dict[str, Any] = {"rule": rule, "groups": groups, "micro_batch": 6, "precision": "fp64", **fields}
    return Recipe(**values)


def update(session: Any, model: Any, optimizer: Any, rates: Rates, batch: Any = BATCH) -> float:
    """One update from one micro batch; returns the norm."""
    with optimizer.micro_batch(last=True):
        optimizer.backward(model(next(session.batches([batch])))["total"])
    return float(optimizer.step(rates))
