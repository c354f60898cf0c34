"""Importance matrices and second moments: collect them with a model, and use their files."""
