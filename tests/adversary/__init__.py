"""Randomised adversary tests: cases are checked against independent oracles and reproducible from their seeds."""
