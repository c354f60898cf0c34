"""What bytes mean: ggml types, codecs, interleaving, the GGUF container, and the `Source` and
`Sink` contracts.
"""
