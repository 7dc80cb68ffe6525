"""Helper functions that do not depend on models or KV caches."""
