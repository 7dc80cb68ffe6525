"""Helpers that know nothing of models or KV caches."""
