"""Memory planning for a model and a context, based on shapes only."""
