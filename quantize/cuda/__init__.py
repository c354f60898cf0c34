"""Quantize on CUDA devices."""
