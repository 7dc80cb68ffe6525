"""The server on a Ray Serve cluster."""
