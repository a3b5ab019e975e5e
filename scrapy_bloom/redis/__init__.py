"""A filter in Redis or Valkey, shared by many crawlers."""
