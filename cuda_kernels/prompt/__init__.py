"""Kernels of the prompt path, at torch level."""
