"""YOLOv5 in its variants n, s, m, l and x."""
