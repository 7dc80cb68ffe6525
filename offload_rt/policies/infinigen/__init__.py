"""Policy "infinigen": predict the next query, score all tokens with compressed keys, fetch the best."""
