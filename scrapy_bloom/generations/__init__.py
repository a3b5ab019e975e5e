"""The generations of a filter, in any storage: growth, time windows and figures."""
