"""Object detection: find boxes and classes of the objects in each image."""
