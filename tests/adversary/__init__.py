"""Randomised tests. Each case is compared with an independent reference, and its seed repeats it."""
