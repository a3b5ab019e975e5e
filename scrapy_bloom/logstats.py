"""The filter's line in the log every minute, beside that of Scrapy's LogStats."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scrapy_bloom.status import FilterStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counts:
    """What has become of the requests of this run so far.

    Attributes:
        recorded: requests recorded.
        filtered: requests filtered.
        forgotten: requests forgotten because they failed; None if none ever is.
    """

    recorded: int
    filtered: int
    forgotten: int | None


def log_stats(status: FilterStatus, now: Counts, before: Counts, extra: Mapping[str, Any]) -> None:
    """Log the filter's figures in one line.

    Args:
        status: the filter's figures now.
        now: the counts that go with them.
        before: the counts that were told last.
        extra: for the log record.
    """
    logger.info(
        "Bloom filter: %s requests recorded (%s), %s in all, %s%s filtered (%s), %.3g %% of the "
        "bits set, error rate now %.2g",
        f"{now.recorded:,}",
        f"{now.recorded - before.recorded:+,}",
        f"{status.count:,}",
        "" if now.forgotten is None else f"{now.forgotten:,} forgotten, ",
        f"{now.filtered:,}",
        f"{now.filtered - before.filtered:+,}",
        100 * status.fill_ratio,
        status.error_rate_now,
        extra=extra,
    )
