"""Tell whether the machine has lost its network, so that downloads fail whatever the site."""

import time
from collections import OrderedDict

MOST_UNREACHABLE = 200  # downloads in a row that fail without a response
_LEAST_SECS = 60.0  # without any response
_MOST_SLOTS = 1000  # that have answered, of which the last ones are known


class Reachability:
    """Watches the ends of downloads.

    Many dead hosts are no reason to close a crawl. So the network is lost only if the last 200
    downloads had no response, none came for a minute, and nothing has answered in this process, or
    a slot is among them that had answered.
    """

    def __init__(self) -> None:
        self._responded_at = time.monotonic()
        self._answered: OrderedDict[str, None] = OrderedDict()
        self._failures = 0  # in a row
        self._last_known = 0  # of these, the last one from a slot that had answered

    def add_response(self, slot: str) -> None:
        """Note a response, whatever its status, from a slot of the downloader."""
        self._responded_at = time.monotonic()
        self._failures = self._last_known = 0
        self._answered[slot] = None
        self._answered.move_to_end(slot)
        if len(self._answered) > _MOST_SLOTS:
            self._answered.popitem(last=False)

    def add_failure(self, slot: str) -> None:
        """Note a download without a response, of a request that did not fail in an earlier run."""
        self._failures += 1
        if slot in self._answered:
            self._last_known = self._failures

    @property
    def is_lost(self) -> bool:
        """Return whether nothing can be reached any more."""
        before = self._failures - MOST_UNREACHABLE
        return (
            before >= 0
            and time.monotonic() >= self._responded_at + _LEAST_SECS
            and (self._last_known > before or not self._answered)
        )
