"""kv-harness: property-based verification of the KV cache and the attention masks of MLX language models."""

__version__ = "0.1.0"
