"""The BLOOM_* settings: the only reader of them."""
