"""Copying between places, as `scrapy bloom copy` does."""

from contextlib import closing
from pathlib import Path

from scrapy_bloom.commands.shared.places import PathPlace, Place, RedisPlace
from scrapy_bloom.copying import transfer


def copy(source: Path | RedisPlace, target: Path | RedisPlace) -> transfer.Copied:
    destination = place_of(target).target()
    with closing(place_of(source).source()) as opened:
        return transfer.copy(opened, destination)


def place_of(place: Path | RedisPlace) -> Place:
    return PathPlace(place) if isinstance(place, Path) else place
