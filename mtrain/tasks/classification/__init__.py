"""Classification: predict one class for each picture."""
