"""Disk storage of KV blocks: stores, saver, loader and eviction policies."""
