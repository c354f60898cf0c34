"""Decode: one to eight new rows as one CUDA graph of matrix-vector kernels. `path.py` builds and
replays the graph, the other files are executors of one kind of layer each.
"""
