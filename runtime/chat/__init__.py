"""Conversations with a model: templates that turn messages into text, and what answers them."""
