"""Compiling CUDA kernels: NVRTC for CUDA C++, numba-cuda for Python functions; one cache."""
