"""Memory planning for a model and a context, computed from shapes only."""
