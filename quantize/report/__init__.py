"""What a run prints and measures: progress, totals, error statistics, validation."""
