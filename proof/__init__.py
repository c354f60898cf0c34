"""Proof that a small model is still good: comparisons, charts and pages to publish."""
