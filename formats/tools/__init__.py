"""Tools that turn GGUF files into GGUF files: split, merge, gate and up of experts; hashes and
summaries.
"""
