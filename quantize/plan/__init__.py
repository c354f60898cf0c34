"""Decide which type each tensor gets: recipes, presets, mixes, budgets."""
