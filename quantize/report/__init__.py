"""Print and measure runs: progress, totals, error statistics, validation."""
