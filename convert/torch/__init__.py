"""Find the position of each tensor in a PyTorch checkpoint (`.bin`)."""
