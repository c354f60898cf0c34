"""Collect importance matrices, read and write them, and look values up."""
