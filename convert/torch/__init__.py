"""PyTorch checkpoints (`.bin`): where each tensor lies in the file."""
