"""The keys of a filter in Redis: what they hold, making and reading them."""
