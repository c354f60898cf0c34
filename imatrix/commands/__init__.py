"""`iqforge imatrix` and its companions."""
