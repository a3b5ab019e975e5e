"""Read the BLOOM_* settings; no other package reads them."""
