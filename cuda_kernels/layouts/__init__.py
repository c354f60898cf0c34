"""Layouts of quantized weights in device memory, one module per type family."""
