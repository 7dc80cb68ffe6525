"""Memory planning for a model and a context. Plans are computed from shapes only."""
