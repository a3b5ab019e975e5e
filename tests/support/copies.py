"""Copying between places, as `scrapy bloom copy` does."""

from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

from scrapy_bloom.commands.shared.places import PathPlace, Place, RedisPlace
from scrapy_bloom.copying import transfer


def copy(sources: Sequence[Path | RedisPlace], target: Path | RedisPlace) -> transfer.Copied:
    destination = place_of(target).target()
    with ExitStack() as stack:
        opened = [stack.enter_context(closing(place_of(each).source())) for each in sources]
        return transfer.copy(opened, destination)


def place_of(place: Path | RedisPlace) -> Place:
    return PathPlace(place) if isinstance(place, Path) else place
