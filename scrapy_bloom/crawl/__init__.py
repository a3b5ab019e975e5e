"""Connect the filter and the queue to Scrapy."""
