"""The runtime: exact prefill, the decode loop, sampling, and the engine that steps a batch."""
