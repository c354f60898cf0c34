"""A Hugging Face checkpoint on disk: folder, configuration, safetensors, shards."""
