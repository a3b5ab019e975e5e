"""Copy a filter and its queue to another place."""
