"""Back-off from a server that hangs: each attempt costs its time-out."""

import time


def next_attempt(begun: float, pause: float = 0.0) -> float:
    """Return when to try again, after a pause at least: attempts take a tenth of our time at most.

    Both times are on the monotonic clock.
    """
    now = time.monotonic()
    return now + max(pause, 10 * (now - begun))
