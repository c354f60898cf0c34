"""PyTorch checkpoints (`.bin`): the position of each tensor in the file."""
