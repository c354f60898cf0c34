"""Layouts of packed matrices, one module per family of types; see `cuda_kernels/layouts.py`."""

from . import iq_k, iq_ks, k, legacy

FAMILIES = (legacy, k, iq_k, iq_ks)
