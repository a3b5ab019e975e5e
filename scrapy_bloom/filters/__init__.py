"""Bloom filters and their mathematics: bytes and bits only."""
