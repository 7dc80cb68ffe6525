"""The host pool: every chunk of KV cache in host memory, who holds it, and what is given up when it is full."""
