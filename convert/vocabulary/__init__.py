"""Convert vocabularies: from tokenizer files to the `tokenizer.*` keys of a GGUF file."""
