"""The fast path on a CUDA device: fused kernels and tensor cores instead of the float32 modules of
the reference path.

`engine.py` runs a network: more than `STEP_ROWS` rows at a time on the prompt path (prefill,
`prompt/`), fewer on the step path (decode, `step/`). Both find an executor by the class of
a module; a module without one runs on the reference path.
"""
