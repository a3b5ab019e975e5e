"""Readiness of a file or pipe: does reading it return at once?"""

import select
import sys
from collections.abc import Callable
from typing import BinaryIO


def readiness(file: BinaryIO) -> Callable[[float], bool]:
    """Return a function that waits until there is something to read, or the end.

    It takes the most seconds to wait, and returns whether reading would not wait any more.
    """
    if sys.platform == "win32":  # waits for nothing but sockets: what reads, waits
        return lambda secs: True  # noqa: ARG005
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return lambda secs: bool(poll.poll(1000 * secs))
