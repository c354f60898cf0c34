"""Recipes as files."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path, text: str, name: str = "r.txt") -> Path:
    """Write a recipe into a folder, and return its path."""
    path = folder / name
    path.write_text(text)
    return path
