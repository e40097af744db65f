"""Language modelling: a causal language model learns to predict the next token of texts."""
