"""Reports on a job for people: its records, the terminal display, TensorBoard events and curves."""
