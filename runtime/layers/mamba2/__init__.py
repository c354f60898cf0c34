"""State-space layers of Mamba-2."""
