"""Samplers on the host: from the logits of a position and a history to the next token."""
