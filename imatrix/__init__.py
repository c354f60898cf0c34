"""Importance matrices: collecting them, both file layouts, and looking values up."""

from .. import runtime  # noqa: F401  says how torch's threads wait, which has to be said before anything here imports torch
