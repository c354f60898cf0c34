"""Prefill: many rows at once. Weights are decoded as they are needed and multiplied on tensor
cores; `path.py` runs a network, the other files are executors of one kind of layer each.
"""
