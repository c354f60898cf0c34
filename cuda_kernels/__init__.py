"""CUDA C++ sources of the runtime, the code that compiles and launches them, and thin functions of
torch tensors over them.
"""
