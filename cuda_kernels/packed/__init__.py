"""Packed matrices: made from the rows of a file, decoded, and their bytes moved."""
