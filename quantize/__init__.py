"""Quantize floats to blocks: searches, the plan of types, and runs that stream tensors through
them.
"""
