"""One spec on several backends: what the jobs have left, how far apart they are, why, and how fast. Imports core and numpy only."""
