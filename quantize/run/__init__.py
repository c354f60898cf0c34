"""The run: stream tensors from a Source through a plan into Sinks, with a journal to resume from."""
