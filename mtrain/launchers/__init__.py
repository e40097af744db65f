"""Launchers turn a job into commands; they import no framework, no backend and no model."""
