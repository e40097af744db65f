"""A real-time network for segmentation."""
