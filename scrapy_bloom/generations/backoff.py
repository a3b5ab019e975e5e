"""Back-off from a server that hangs: each attempt costs its time-out."""

import time


def next_attempt(begun: float, pause: float = 0.0) -> float:
    """Return when to try again, on the monotonic clock: attempts take a tenth of our time at most.

    Args:
        begun: when the last attempt began, on the monotonic clock.
        pause: seconds from now on, at least.
    """
    now = time.monotonic()
    return now + max(pause, 10 * (now - begun))
