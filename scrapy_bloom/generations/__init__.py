"""Growth and time: the generations of a filter, whatever keeps them."""
