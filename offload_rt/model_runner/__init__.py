"""One batch through the layers: prefill, decode, attention."""
