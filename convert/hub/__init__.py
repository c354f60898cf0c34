"""Read a checkpoint on the Hugging Face Hub in ranges."""
