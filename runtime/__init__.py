"""The reference runtime: models from GGUF files, on CPU and GPU."""

import os

# Threads that wait for the next product should sleep. Spinning wins nothing measurable on an idle machine and costs two thirds of
# the speed where cores are shared. OpenMP reads this when torch is first imported, so it has to stand here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
