"""Functions that several detectors share."""
