"""Read and write importance matrix files: legacy `.dat`, GGUF and snapshots to resume from."""
