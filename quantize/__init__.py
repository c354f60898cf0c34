"""Floats to blocks: searches, the plan of types, and the run that streams tensors through them."""
