"""Speculative decoding: draft tokens, and the pass of full attention that verifies them."""
