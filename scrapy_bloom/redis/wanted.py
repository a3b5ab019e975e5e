"""What a crawl's settings ask of a shared filter, compared with the one that is there."""

import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from scrapy_bloom.exceptions import FingerprinterMismatchError
from scrapy_bloom.filters.hashing import SALT_BYTES
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.redis.keys.meta import FilterInfo, RedisGeneration

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A shared filter, as the settings of a crawl ask for it.

    Attributes:
        policy: sizes and ends of new generations.
        origin: what a new one holds, and whose.
    """

    policy: Policy
    origin: Origin

    def info(self, now: float) -> FilterInfo:
        """Return what a new filter begins with."""
        return FilterInfo(
            salt=(self.origin.salt or secrets.token_bytes(SALT_BYTES)).hex(),
            fingerprinter=self.origin.fingerprinter,
            spider=self.origin.spider,
            created_at=now,
        )

    def check(self, info: FilterInfo, name: str) -> None:
        """Check that a filter can be used.

        Raises:
            FingerprinterMismatchError: it has other fingerprints.
        """
        if info.fingerprinter != self.origin.fingerprinter:
            raise FingerprinterMismatchError(
                f"{name} was recorded with REQUEST_FINGERPRINTER_CLASS = "
                f"{info.fingerprinter!r}, and this crawl has "
                f"{self.origin.fingerprinter!r}: no request would be found in it; set "
                "REQUEST_FINGERPRINTER_CLASS back, or use another BLOOM_REDIS_KEY"
            )

    def log_differences(self, info: FilterInfo, live: Sequence[RedisGeneration], name: str) -> None:
        """Log how the filter that is there differs from what is asked for."""
        policy, newest = self.policy, live[-1]
        differences = []
        if self.origin.salt not in {None, bytes.fromhex(info.salt)}:
            differences.append("its own salt (BLOOM_SALT is for a new one)")
        capacity = sum(each.capacity for each in live)
        if not policy.window and policy.first().capacity > capacity:
            differences.append(f"room for {capacity:,} requests")
        error_rate = sum(each.error_rate for each in live)
        if policy.is_exceeded(error_rate):
            differences.append(f"an error rate of {error_rate:.2g}")
        if bool(policy.window) != bool(newest.open_until):
            differences.append("a time window" if newest.open_until else "no time window")
        if differences:
            logger.info(
                "This crawl joins %s, which was made with other settings and stays as it is: %s. "
                "The settings count for further generations; all crawlers that share a filter "
                "should have the same",
                name,
                ", ".join(differences),
            )
