"""What a filter costs and holds: comparisons, the report, their pictures."""
