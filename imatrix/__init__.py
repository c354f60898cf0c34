"""Importance matrices: collecting them, both file layouts, and looking values up."""
