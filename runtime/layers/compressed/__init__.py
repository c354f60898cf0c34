"""Attention to near positions and to entries that stand for runs of positions (DeepSeek V4)."""
