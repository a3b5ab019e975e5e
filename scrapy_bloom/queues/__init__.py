"""Requests that wait to be crawled."""
