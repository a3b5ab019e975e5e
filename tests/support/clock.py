"""A clock of a test's own."""


class Clock:
    """Shows `now`, in seconds since 1970, which the test moves."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
