"""Tools that turn GGUF files into GGUF files: splitting, merging, gate and up of experts. Also
hashes and summaries.
"""
