"""Compare the training of one spec on several backends: how far the jobs differ, why, and how fast they are. Imports
core and numpy only."""
