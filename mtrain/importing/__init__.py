"""Configs of other projects into specs: PaddleDetection's YAML, YOLOv5's model, hyper-parameter and data YAML."""
