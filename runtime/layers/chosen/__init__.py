"""Softmax attention to blocks of positions that an indexer chooses (Qwen3.8-Flash-Next)."""
