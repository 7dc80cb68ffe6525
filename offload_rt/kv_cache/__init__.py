"""The host pool: every block of KV cache in host memory, who holds it, and what is given up when it is full."""
