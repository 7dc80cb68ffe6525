"""Runs batches through the layers of a model: prefill, decode steps and verification passes."""
