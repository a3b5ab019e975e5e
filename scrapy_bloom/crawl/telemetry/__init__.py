"""What a crawl tells of its filter: stats, log lines, failures."""
