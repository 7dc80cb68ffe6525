"""KV cache on disk: concurrent direct I/O, which bypasses the operating system's page cache."""
