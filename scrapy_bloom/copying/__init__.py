"""Copying filters: between a directory and Redis, and together."""
