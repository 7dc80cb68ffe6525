"""Sessions: conversations whose text and KV cache survive restarts."""
