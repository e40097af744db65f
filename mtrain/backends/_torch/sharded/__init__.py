"""Models of which each rank holds a part of every array."""
