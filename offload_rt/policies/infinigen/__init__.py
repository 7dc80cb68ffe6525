"""The policy "infinigen": speculate the next query, score all tokens with compressed keys, fetch the best."""
