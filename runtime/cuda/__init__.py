"""The fast path on a CUDA device: fused kernels and tensor cores instead of the truth path's
float32 modules.

`engine.py` runs a network: more than `STEP_ROWS` rows at a time on the prompt path (`prompt_*.py`),
fewer on the decode path (`step_*.py`). Both look an executor up by the class of a module; a module
without one runs as the truth path has it.
"""
