"""Sessions: conversations whose text and KV cache survive turns, eviction and restarts."""
