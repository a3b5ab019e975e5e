"""Copying between places, as `scrapy bloom copy` does."""

from contextlib import closing
from pathlib import Path

from scrapy_bloom.commands.shared.places import PathPlace, Place, RedisPlace


def copy(source: Path | RedisPlace, target: Path | RedisPlace) -> int:
    """Return how many requests of a queue were copied."""
    with closing(place_of(source).source()) as opened:
        return place_of(target).copy_from(opened)


def place_of(place: Path | RedisPlace) -> Place:
    return PathPlace(place) if isinstance(place, Path) else place
