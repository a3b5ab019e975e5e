"""What scrapy_bloom promises about time and space, measured: `python -m benchmarks`."""
