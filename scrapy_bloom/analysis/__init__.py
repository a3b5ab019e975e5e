"""The report of a filter, and its pictures."""
