"""Time per kernel and layer."""
