"""Computation of batches through the layers of a model: prefill, decode, attention."""
