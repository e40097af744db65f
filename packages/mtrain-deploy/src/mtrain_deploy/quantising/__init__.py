"""``mtrain quantise``: an exported model whose layers compute with 8-bit integers."""
