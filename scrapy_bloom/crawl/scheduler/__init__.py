"""Schedule requests with a queue that survives a kill."""
