"""Weights that stay in host memory and are copied to the device on demand."""
