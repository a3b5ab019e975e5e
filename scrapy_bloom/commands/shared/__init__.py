"""Parts that several subcommands need."""
