"""Quantizing on CUDA devices."""
