"""The reference runtime: models from GGUF files, on CPU and GPU."""

import os


def let_threads_sleep() -> None:
    """Let threads sleep while they wait for the next product. Otherwise they spin, and take the
    cores from all else that runs, such as the decoding of weights.

    OpenMP reads the setting when torch is first imported: call this before.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
