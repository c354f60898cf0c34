"""Hugging Face checkpoints as a `Source` of GGUF tensors."""
