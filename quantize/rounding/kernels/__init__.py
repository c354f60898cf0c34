"""Compiled loops of rounding with second moments, for the CPU."""
