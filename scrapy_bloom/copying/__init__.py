"""Copy a filter and its queue between a directory and Redis, and merge filters."""
