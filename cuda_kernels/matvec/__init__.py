"""Matrix-vector products on packed matrices, for decode steps."""
