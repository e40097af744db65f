"""Image decoding, geometry, colour and drawing, without any task."""
