"""Configurations of other projects as specs: PaddleDetection and YOLOv5."""
