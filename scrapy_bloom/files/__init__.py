"""Keep a filter in the files of a directory."""
