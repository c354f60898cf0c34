"""Searches: floats to blocks, a file per family of types, written once for CPU and GPU."""
