"""Contents of a job directory, and whether its last run was killed."""
