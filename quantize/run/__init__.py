"""Runs: streaming tensors from a source through a plan into sinks, and resuming."""
