"""Rows of output tensors as functions of rows of stored tensors."""
