"""What mixes rows of a sequence in prompts: attention, latent attention, delta nets."""
