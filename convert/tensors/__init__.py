"""Compute rows of output tensors from rows of stored tensors."""
