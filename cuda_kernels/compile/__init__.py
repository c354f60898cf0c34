"""Compile CUDA kernels: NVRTC for CUDA C++, numba-cuda for Python functions, with one cache."""
