"""A checkpoint on the Hugging Face Hub, read in ranges."""
