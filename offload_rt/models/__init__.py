"""Adapters: transformers' own modules, called layer by layer. The registry maps architectures to them."""
