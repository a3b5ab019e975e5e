"""Read a job directory, and detect whether its last process was killed."""
