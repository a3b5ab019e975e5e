"""What a typed program may do with the public names; checked by mypy, not run."""

from pathlib import Path

from scrapy_bloom import BloomDupeFilter, BloomError, BloomFilter, SettingError

seen = BloomFilter(1000, 1e-6, salt=bytes(16))
is_new: bool = seen.add(b"page")
is_in: bool = b"page" in seen
rate: float = seen.estimated_error_rate
count: int = seen.approximate_count

seen.add("page")  # type: ignore[arg-type]
seen.add(Path("page"))  # type: ignore[arg-type]
BloomFilter("1000", 1e-6)  # type: ignore[arg-type]


def use(dupefilter: BloomDupeFilter) -> None:
    dupefilter.close("finished")
    error: type[BloomError] = SettingError
    as_value_error: type[ValueError] = SettingError
    print(error, as_value_error)
