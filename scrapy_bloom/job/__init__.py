"""Read a job directory, and detect whether its last run was killed."""
