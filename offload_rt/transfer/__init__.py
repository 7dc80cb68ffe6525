"""Transfers between host memory and the compute device."""
