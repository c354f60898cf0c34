"""Round rows with second moments on CUDA devices."""
