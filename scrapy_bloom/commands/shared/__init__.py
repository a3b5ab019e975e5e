"""What several subcommands need."""
