"""A filter in files of a directory."""
