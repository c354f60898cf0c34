"""What kernels of prompts and of decoding steps share: descriptions of their operations."""
