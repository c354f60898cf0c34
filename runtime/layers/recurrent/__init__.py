"""Recurrent layers that build on delta nets' parts: state-space layers and short convolutions."""
