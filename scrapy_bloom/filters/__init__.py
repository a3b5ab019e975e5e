"""The filters themselves and their mathematics: bytes and bits only."""
