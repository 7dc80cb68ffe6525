"""Chunks of KV on disk, and who writes, reads and orders them."""
