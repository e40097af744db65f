"""Reporters that mtrain ships. They are loaded by name; the interface is ``core.interfaces.reporter``."""
