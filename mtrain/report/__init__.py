"""What a job tells people: records, terminal display, TensorBoard, curves."""
