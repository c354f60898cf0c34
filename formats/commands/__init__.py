"""Commands on GGUF files and types."""
