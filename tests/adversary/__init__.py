"""The standing adversary: random cases against independent oracles, each reproducible from its seed."""
