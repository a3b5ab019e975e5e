"""A simulated site, and the spider that crawls it."""

import random
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from scrapy import Request, Spider
from scrapy.http import Response
from twisted.python.failure import Failure

ALWAYS = 10**9  # times that a page fails


@dataclass(frozen=True)
class Site:
    """Pages with links to others."""

    links: Sequence[Sequence[int]]
    starts: Sequence[int]  # what start() yields
    is_start_filtered: bool  # whether these are new once in each run; else they are not filtered
    raises: bool  # start(), after these
    killers: Sequence[int]  # of their worker
    failing: Mapping[int, tuple[int, str]]  # how often, and how: "down", "503" or "raises"
    errbacks: Mapping[int, int]  # what the errbacks of pages request
    in_memory: AbstractSet[int]  # pages whose requests cannot be serialized
    redirects: Mapping[int, int]

    @classmethod
    def random(cls, dice: random.Random) -> "Site":
        number = dice.randint(1, 13)
        pages = range(number)

        def some(share: float = 0.5) -> list[int]:
            return dice.sample(pages, dice.randint(0, int(number * share)))

        def is_there(rate: float) -> bool:
            return dice.random() < rate

        links = [dice.sample(pages, dice.randrange(min(number, 5))) for _ in pages]
        failing, redirects = {}, {}
        if is_there(0.6):
            kinds = ["down", "503", "raises"]
            failing = {
                page: (dice.choice([1, 1, 2, 3, ALWAYS]), dice.choice(kinds)) for page in some()
            }
            targets = dice.sample(pages, dice.randint(1, min(number, 3)))
            redirects = {page: dice.choice(targets) for page in some()}
        killers = [dice.choice(pages)] if is_there(0.15) else []
        in_memory = some(0.3) if is_there(0.3) else []
        site = cls(
            links,
            starts=dice.sample(pages, dice.randint(1, min(number, 3))),
            is_start_filtered=is_there(0.5),
            raises=is_there(0.2),
            killers=killers,
            failing=failing,
            errbacks={page: dice.choice(pages) for page in some()} if is_there(0.3) else {},
            in_memory=set(),
            redirects=redirects,
        )
        # Those that kill, too, would kill with the pages that lead to them.
        return replace(site, in_memory={page for page in in_memory if not site.is_deadly(page)})

    def repaired(self) -> "Site":
        return replace(self, failing={}, redirects={})

    def chain_of(self, page: int) -> list[int]:
        """Return a page, and the pages to which it redirects, one after another."""
        chain: list[int] = []
        while page not in chain:
            chain.append(page)
            if page not in self.killers:
                page = self.redirects.get(page, page)
        return chain

    def is_circle(self, page: int, visited: Collection[int]) -> bool:
        """Return whether a page leads to redirects in a circle, of which two pages were queued."""
        # One that is redirected to the other, which was never downloaded, is done.
        last = self.chain_of(page)[-1]
        circle = {*self.chain_of(self.redirects[last])} if last in self.redirects else set()
        links = {link for entry in visited for link in self.links[entry]}
        return len(circle & {*self.starts, *self.errbacks.values(), *links}) > 1

    def is_deadly(self, page: int) -> bool:
        return not {*self.killers}.isdisjoint(self.chain_of(page))

    def reached(
        self,
        pages: Iterable[int],
        done: Collection[int],
        rescued: Collection[int],
        *,
        only_in_memory: bool = False,
    ) -> set[int]:
        """Return the pages that a crawl finds from some pages on."""
        found, to_do = set(), [*pages]
        while to_do:
            page = to_do.pop()
            is_end = page in found or page in self.killers
            found.add(page)
            if is_end:
                continue
            errbacks = [self.errbacks[page]] if page in rescued else []
            links = self.links[page] if page in done else errbacks
            if page in self.redirects:
                to_do.append(self.redirects[page])
            else:
                to_do += [link for link in links if link in self.in_memory or not only_in_memory]
        return found


def url_of_page(page: int) -> str:
    return f"http://{'ab'[page % 2]}.example/{page}"


def page_of(url: str) -> int:
    return int(url.rpartition("/")[2])


class SimSpider(Spider):
    """Crawls the site."""

    name = "sim"
    worker: Any

    async def start(self) -> AsyncIterator[Any]:
        site = self.worker.world.site
        for page in site.starts:
            yield self._request(page, dont_filter=not site.is_start_filtered)
            await self.worker.loop.pause()
        if site.raises:
            raise ZeroDivisionError

    def _request(self, page: int, *, dont_filter: bool = False) -> Request:
        return Request(
            url_of_page(page),
            self.parse,
            errback=self.rescue,
            priority=page % 3,
            dont_filter=dont_filter,
        )

    def _link(self, page: int) -> Request:
        request = self._request(page)
        if page not in self.worker.world.site.in_memory:
            return request
        return request.replace(callback=partial(SimSpider.parse, self))

    def parse(self, response: Response) -> Iterator[Request]:
        page, world = page_of(response.url), self.worker.world
        links = world.site.links[page]
        for number, link in enumerate(links):
            if response.flags and 2 * number >= len(links):
                break
            yield self._link(link)
        if response.flags:
            raise ZeroDivisionError
        world.done.add(page)

    def rescue(self, failure: Failure) -> Iterator[Request]:
        request: Request = failure.request  # type: ignore[attr-defined]  # as Scrapy sets it
        page, world = page_of(request.url), self.worker.world
        if page in world.site.errbacks:
            yield self._link(world.site.errbacks[page])
            world.rescued.add(page)
