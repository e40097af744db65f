"""Keypoints as a task of mtrain: points of a known kind are found in the box around a person or a thing."""
