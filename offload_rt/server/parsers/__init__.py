"""Streaming parsers for reasoning and tool calls in the output of instruct models."""
