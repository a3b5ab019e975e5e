"""Scrapy's side: the dupefilter, and what it needs of a crawl."""
