"""CUDA C++ sources of the runtime, what compiles and launches them, and thin functions of torch
tensors over them.
"""
