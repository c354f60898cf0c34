"""Speed measurements: llama-bench tests, synthetic models, records."""
