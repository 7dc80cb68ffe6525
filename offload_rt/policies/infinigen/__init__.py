"""Policy "infinigen": predict the next layer's query, score all tokens with compressed keys, fetch the best tokens."""
