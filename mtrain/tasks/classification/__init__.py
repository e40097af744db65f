"""Classification: predict one class for each image."""
