"""CUDA C++ sources of the runtime and what compiles them. Empty so far: on every device the runtime decodes with `formats.codec`."""
