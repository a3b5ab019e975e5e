"""Talking to a Redis server: clients, outages, errors."""
