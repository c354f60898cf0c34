"""The metadata keys of a converted model."""
