"""HTTP server with the OpenAI and Anthropic protocols and a web page, on top of `AsyncLLM`."""
