"""OpenAI's Chat Completions, Completions and Responses APIs."""
