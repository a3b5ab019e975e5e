"""What a job directory holds, and whether its last run was killed."""
