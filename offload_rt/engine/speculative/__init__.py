"""Speculative decoding: drafts, and the pass that verifies them."""
