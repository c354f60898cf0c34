"""Attention of decode steps, latent attention, and the choice of positions."""
