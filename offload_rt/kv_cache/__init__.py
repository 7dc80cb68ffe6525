"""KV cache in host memory or on disk: allocation, sharing and eviction of blocks."""
