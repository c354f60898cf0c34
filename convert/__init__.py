"""Read Hugging Face checkpoints as sources of GGUF tensors."""
