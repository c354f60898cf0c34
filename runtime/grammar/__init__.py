"""Grammars and JSON schemas that a generated text follows."""
