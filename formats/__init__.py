"""File formats: ggml types, codecs, interleaving, the GGUF container, and the contracts of sources
and sinks.
"""
