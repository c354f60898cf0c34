"""Layouts of packed matrices, one module per family of types; see `cuda_kernels/layouts.py`."""

from . import floats, fp4, grid, iq_k, iq_ks, k, legacy, q8, ternary, trellis

FAMILIES = (floats, legacy, fp4, k, grid, ternary, iq_k, iq_ks, trellis, q8)
