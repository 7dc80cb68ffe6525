"""Randomised tests. Each case is compared with an independent reference and can be repeated with its seed."""
