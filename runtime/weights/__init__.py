"""Weights of a model: encoded in the file or in the memory of a GPU, and products with them."""
