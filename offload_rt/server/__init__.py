"""The HTTP server: OpenAI's and Anthropic's protocols, and a page, over one `AsyncLLM`."""
