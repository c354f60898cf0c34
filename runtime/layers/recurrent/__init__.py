"""Layers with recurrent states: delta nets, state-space layers and gated short convolutions."""
