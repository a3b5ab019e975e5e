"""A random site that is ill in some nights, and what a process has of a crawl of it."""

import ast
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from scrapy_bloom.queues.store import Batch, Entered, Store, Taken
from tests.support.request_queues import name_of, page, request, start_page


class Site:
    """A random site: some pages link others, and some are redirected for good."""

    def __init__(self, size: int, seed: int) -> None:
        dice, urls = random.Random(seed), range(size)
        kinds = [dice.choices(["link", "session", "memory"], [8, 1, 1], k=4) for _ in urls]
        self.links = [  # of each page: a page, and the kind of its visit
            [(dice.choice(urls), k) for k in some[: dice.randint(0, 4)]] for some in kinds
        ]
        self.starts = [  # what start() yields: a page, and whether the request is filtered
            (url, dice.random() < 0.4) for url in dice.choices(urls, k=dice.randint(1, 4))
        ]
        self.once = {url for url in urls if dice.random() < 0.2}
        self.once |= {url for url, is_filtered in self.starts if is_filtered}
        moved = {url: dice.choice(urls) for url in urls if dice.random() < 0.15}
        self.moved = {url: to for url, to in moved.items() if to not in moved}

    def outcomes(self, dice: random.Random) -> dict[int, str | int]:
        """How pages end in a night in which the site is ill; a number is a redirect."""
        urls = range(len(self.links))
        favourite, health = dice.choice(urls), dice.choice([0.2, 0.5, 0.8])
        outcomes: dict[int, str | int] = {}
        for url in urls:
            ends: list[str | int] = ["fails", "retry", "wall", "errback", "unreadable"]
            ends += [favourite, dice.choice(urls)]
            (end,) = dice.choices(ends, [4, 1, 1, 1, 1, 8, 4])
            if url == favourite:
                outcomes[url] = dice.choice(["fails", "fails", "answers", "retry", "wall"])
            elif dice.random() > health:
                outcomes[url] = end
        return outcomes


class Visit(NamedTuple):
    """What the bytes of a request contain: its visit, and the pages that this has led to.

    `kind` is "link", "once", "start" (not filtered), "session" (not filtered), or "memory".
    """

    number: int
    kind: str
    urls: tuple[int, ...]
    is_retry: bool = False

    @property
    def url(self) -> int:
        return self.urls[-1]

    def entered(self, taken: Taken | None = None, *, is_start: bool = False) -> Entered:
        """The request as it enters the queue, or replaces another one of the visit."""
        data = request(repr(tuple(self))).data
        if taken and (self.is_retry or self.kind in {"start", "session"}):
            return Entered(data, is_filtered=False, replaces=taken.id)
        if self.kind == "session":
            return Entered(data, is_filtered=False)
        if self.kind == "start":
            return start_page(f"/{self.url}", data=data)
        options = {"once": self.kind == "once", "is_start": is_start}
        return page(f"/{self.url}", data=data, replaces=taken and taken.id, **options)


def visit_of(data: bytes) -> Visit:
    """The visit of a request in a store."""
    return Visit(*ast.literal_eval(name_of(Taken(0, data, ""))))


@dataclass(eq=False)
class Flight:
    """A request that was taken, or that is kept in memory until it is done."""

    visit: Visit
    taken: Taken | None = None
    parent: "Flight | None" = None
    children: int = 0  # requests in memory that are not done
    awaits: list[int] = field(default_factory=list)
    has_failed: bool = False


@dataclass
class Process:
    """A worker: its requests in flight, and the batch that it collects."""

    store: Store
    flights: list[Flight] = field(default_factory=list)
    batch: Batch = field(default_factory=Batch)
    answers: list[Callable[[bool], object]] = field(default_factory=list)  # was each one queued?
    facts: list[Callable[[], object]] = field(default_factory=list)  # once the batch is applied
    to_start: list[tuple[int, bool]] = field(default_factory=list)
    runs_start: bool | None = None  # None: not known yet

    def enter(self, entered: Entered, answer: Callable[[bool], object] = bool) -> None:
        self.batch.entered.append(entered)
        self.answers.append(answer)
