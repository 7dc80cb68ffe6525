"""What a model and a context will need, from shapes alone."""
