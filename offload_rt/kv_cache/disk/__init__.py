"""KV cache on disk: concurrent direct I/O that bypasses the page cache."""
