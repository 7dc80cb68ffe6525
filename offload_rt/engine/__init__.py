"""Requests, their order, and what runs them."""
