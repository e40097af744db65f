"""A U-Net for segmentation."""
