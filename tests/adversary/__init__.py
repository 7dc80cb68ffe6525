"""Randomised tests: independent references check each case, and its seed repeats it."""
