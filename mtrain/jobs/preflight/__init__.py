"""Checks of all hosts of a job before any rank starts."""
