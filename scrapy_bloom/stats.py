"""The bloom/* stats of a crawl."""

from typing import TYPE_CHECKING

from scrapy_bloom.status import FilterStatus

if TYPE_CHECKING:
    from scrapy.statscollectors import StatsCollector


def set_stats(
    stats: "StatsCollector", status: FilterStatus, *, added: int, forgotten: int | None
) -> None:
    """Bring the stats up to date, but for the errors.

    Args:
        stats: the crawler's.
        status: the filter's figures now.
        added: requests recorded in this run.
        forgotten: requests forgotten in this run because they failed; None if none ever is.
    """
    for name, value in (
        ("added", added),
        ("count", status.count),
        ("capacity", status.capacity),
        ("fill_ratio", status.fill_ratio),
        ("error_rate", status.error_rate_now),
        ("bytes", status.nbytes),
        ("generations", len(status.generations)),
        ("forgotten", forgotten),
        ("expired", status.expired or None),
        *status.more.items(),
    ):
        if value is not None:
            stats.set_value(f"bloom/{name}", value)
