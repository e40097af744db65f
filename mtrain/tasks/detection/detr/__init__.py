"""Detectors of Hugging Face's transformers as models of the detection task."""
