"""Requests, scheduling and execution."""
