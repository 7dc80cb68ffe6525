"""OpenAI's protocols."""
