"""What several benchmarks need: sites, servers, other filters, and how a page is made."""
