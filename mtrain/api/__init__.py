"""mtrain's Python functions: what was asked for in, a typed result out."""
