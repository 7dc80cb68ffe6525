"""Weights kept in host memory and copied to the device on demand."""
