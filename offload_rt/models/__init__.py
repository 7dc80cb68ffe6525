"""Model adapters, which call transformers' own modules layer by layer, and their registry by architecture."""
