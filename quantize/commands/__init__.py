"""`iqforge quantize` and its companions."""
