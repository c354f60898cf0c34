"""Importance matrix files: legacy `.dat`, GGUF, resume snapshots."""
