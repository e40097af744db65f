"""Language modelling: a causal language model learns to predict the next token of texts."""

__version__ = "0.1.0"
