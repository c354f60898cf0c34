"""How quantized weights lie in device memory, one module per type family."""
