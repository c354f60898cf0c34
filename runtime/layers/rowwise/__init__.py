"""Further layers that work on every row alone."""
