"""What the next batch of a script is."""
