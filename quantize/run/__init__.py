"""Run quantizations: stream tensors from a source through a plan into sinks, and resume."""
