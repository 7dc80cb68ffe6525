"""Speculative decoding: generation of draft tokens, and the full-attention pass that verifies them."""
