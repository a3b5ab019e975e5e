"""Comparisons of filters, the report of one, and their pictures."""
