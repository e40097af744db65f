"""YOLOv5 n, s, m, l and x."""
