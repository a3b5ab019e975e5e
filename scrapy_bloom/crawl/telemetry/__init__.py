"""Stats, log lines and failures: news of the filter from a crawl."""
