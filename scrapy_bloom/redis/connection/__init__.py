"""Connections to a Redis server: clients, outages, errors."""
