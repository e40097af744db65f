"""The modes of a rank whose job is a spec: train, evaluate and predict."""
