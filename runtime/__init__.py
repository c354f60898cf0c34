"""The reference runtime: models from GGUF files, on CPU and GPU."""

import os

# Threads that wait for the next product should sleep: spinning takes the cores from whatever else
# runs, our own decoding included. OpenMP reads this when torch is first imported, so it has to
# stand here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
