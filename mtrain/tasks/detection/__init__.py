"""Object detection: pictures with boxes."""
