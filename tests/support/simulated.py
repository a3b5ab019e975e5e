"""Workers of a simulated crawl: real stores and filters, whose calls a schedule drives."""

import functools
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.generations.lifecycle import NoRoomError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Policy
from scrapy_bloom.queues import collected
from scrapy_bloom.queues.batch import Found
from scrapy_bloom.queues.collected import Collected, SharedBatch
from scrapy_bloom.queues.shared import RejoinedError, Reply, SharedStore
from scrapy_bloom.redis import filter as filter_module
from scrapy_bloom.redis import making
from scrapy_bloom.redis.backend import join_shards
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import LostKeysError, OtherFilterError, SharedFilter
from scrapy_bloom.redis.scripts import shard_key, shard_of
from tests.support import servers

KEY = "sim"
LEASE_MS = 1000
LOCK_MS = 1  # of the clock on the wall: each crawl makes what it needs
MAX_BATCH = 3  # requests found and done
CALL_MS = 20  # what a call of the server takes
CONTROL = "control"  # a key: the time of the scripts, and how many writes the next one may make
POLICY = Policy(expected=4, error_rate=1e-6)

# In place of the server's clock and `redis.call`, which fails where the schedule says so.
_CONTROLLED = """
local seconds, microseconds, writes_left = string.match(
  redis.call('GET', 'control'), '^(%d+) (%d+) (%d+)$')
writes_left = tonumber(writes_left)
local writes = {ZADD = 1, ZREM = 1, ZREMRANGEBYLEX = 1, HSET = 1, HDEL = 1, HSETNX = 1,
                HINCRBY = 1, BITFIELD = 1, UNLINK = 1}
local function call(command, ...)
  if command == 'TIME' then return {seconds, microseconds} end
  if writes[command] then
    if writes_left == 0 then error('failed half-way') end
    writes_left = writes_left - 1
  end
  return redis.call(command, ...)
end
"""


@functools.cache
def controlled(script: str, moves: int) -> str:
    """Return a script that depends on the key, and moves so many requests at once."""
    before, call, after = script.partition("local call = redis.call\n")
    assert call
    return (before + _CONTROLLED + after).replace(
        "local moves,", f"local moves = {moves}\nlocal _,"
    )


class KilledError(BaseException):
    """Ends the thread of a worker that was killed."""


class Site:
    """Pages with links to others.

    Attributes:
        links: of each page.
        starts: pages that start() yields.
        raises: start() raises after these.
        killers: pages that kill their worker.
    """

    def __init__(
        self,
        links: Sequence[Sequence[int]],
        *,
        starts: Sequence[int] = (0,),
        is_start_filtered: bool = False,
        raises: bool = False,
        killers: Sequence[int] = (),
    ) -> None:
        self.links = links
        self.starts = starts
        self.is_start_filtered = is_start_filtered
        self.raises = raises
        self.killers = killers

    def start(self) -> Iterator[int]:
        yield from self.starts
        if self.raises:
            raise ZeroDivisionError

    @classmethod
    def random(
        cls, dice: random.Random, *, has_killers: bool = True, most_pages: int = 13
    ) -> "Site":
        pages = dice.randint(1, most_pages)
        links: list[list[int]] = [
            dice.sample(range(pages), dice.randrange(min(pages, 5))) for _ in range(pages)
        ]
        if most_pages > 13 and dice.random() < 0.5:  # a tree: each page is found on one other
            links = [[] for _ in range(pages)]
            for page in range(1, pages):
                links[dice.randrange(page)].append(page)
        return cls(
            links,
            starts=dice.sample(range(pages), dice.randrange(1, min(pages, 3) + 1)),
            is_start_filtered=dice.random() < 0.5,
            raises=dice.random() < 0.2,
            killers=[dice.randrange(pages)] if has_killers and dice.random() < 0.15 else [],
        )

    def reachable(self) -> set[int]:
        found, to_do = set(), [*self.starts]
        while to_do:
            page = to_do.pop()
            if page not in found:
                found.add(page)
                to_do += [] if page in self.killers else self.links[page]
        return found


@functools.cache
def connections_of(client: Any) -> list[Any]:
    """Return what the workers of one server share: a connection for each would take minutes."""
    return []


class SimServer(RedisServer):
    """A worker's connection: each call waits for its turn, and may fail."""

    def __init__(self, world: Any, worker: "Worker", url: str) -> None:
        super().__init__(url)
        self._client = world.client  # one for all, since only one of them calls
        self._idle = connections_of(world.client)
        self._world = world
        self._worker = worker

    def script(self, text: str, keys: Sequence[str], *args: Any, **options: bool) -> Any:
        return super().script(controlled(text, self._world.moves), keys, *args, **options)

    def call(
        self,
        function: Callable[[Any], Any],
        *,
        patient: bool = True,
        fails_when_full: bool = False,
    ) -> Any:
        return self._world.call(self._worker, functools.partial(super().call, function))


class Worker:
    """What a crawl does with its store."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.leaves = self.is_over = False
        server = SimServer(world, self, world.server.url)
        self.filters = [
            SharedFilter(
                server,
                shard_key(KEY, shard),
                POLICY,
                ANY_ORIGIN,
                mirror=world.mirror,
                shards=world.shards,
            )
            for shard in range(world.shards)
        ]
        for each in self.filters:
            each._clock = lambda: world.now / 1000
        self.store = SharedStore(
            self.filters, "spider", by_slot=world.by_slot, lease_secs=LEASE_MS / 1000
        )

    def crawl(self) -> None:
        self._join(OtherFilterError())
        while True:
            self.world.turn(self)
            try:
                if self.leaves or self.is_over:
                    self._ended()
                    return
                self._work()
                reply = self._exchange()
            except OutageError:
                continue
            except OtherFilterError as error:
                self._start_over(error)
            else:
                self._note(reply)

    def _start_over(self, error: OtherFilterError) -> None:
        if not isinstance(error, RejoinedError):
            self._join(error)
            return
        self._forget()
        for each in error.lost:
            self._collected.add_found(each)
            self._unsent.add(int(each.data))

    def _join(self, error: OtherFilterError) -> None:
        """As the scheduler does it after each error that voids what it knows, or at its start."""
        while True:
            self._forget()
            try:
                if isinstance(error, LostKeysError):
                    self.filters[0].clear()
                join_shards(self.filters)
                self.store.join()
            except OutageError:
                continue
            except OtherFilterError as again:
                error = again
                continue
            return

    def _forget(self) -> None:
        self._in_flight: dict[bytes, int] = {}
        self._collected = Collected()
        self._unanswered: SharedBatch | None = None
        self._unsent: set[int] = set()  # pages in these
        self._start: Iterator[int] | None = None
        self._last_look: tuple[int, int] | None = None
        self.is_over = False

    def _work(self) -> None:
        """Crawl some of the pages in flight, and run a part of start()."""
        choose = self.world.choose_detail
        if self._start is not None:
            for _ in range(choose(1, 3)):
                try:
                    self._found(next(self._start), is_start=True)
                except (StopIteration, ZeroDivisionError):
                    self._start = None
                    self._collected.last().start_ended = True
                    break
        for token in list(self._in_flight)[: choose(0, len(self._in_flight))]:
            page = self._in_flight[token]
            self.world.crawl(page)
            for link in self.world.site.links[page]:
                self._found(link)
            if choose(0, 4) == 1:
                break  # the callback has not ended, and what it has found is sent meanwhile
            del self._in_flight[token]
            self._collected.last().done.append(token)

    def _found(self, page: int, *, is_start: bool = False) -> None:
        is_filtered = not is_start or self.world.site.is_start_filtered
        fingerprint = b"page %d" % page
        filter_ = self.filters[shard_of(fingerprint, len(self.filters))]
        if is_filtered and (page in self._unsent or filter_.knows(fingerprint)):
            return
        self._unsent.add(page)
        slot = "ab"[page % 2] if self.world.by_slot else ""
        found = Found(b"%d" % page, fingerprint if is_filtered else None, slot, priority=page % 3)
        self._collected.add_found(found)

    def _exchange(self) -> Reply:
        for each in self.filters:
            if each.live[-1].count >= POLICY.grow_at(each.live):
                with suppress(NoRoomError):  # the server was set back while the keys were made
                    each.append(POLICY.next(each.live), each.now(), 0.0)
        if self._unanswered is None:
            self._unanswered = self._collected.next_batch()
            self._unanswered.may_start = self._start is None
            self._unanswered.want = max(0, self.world.choose_detail(2, 3) - len(self._in_flight))
        return self.store.apply(self._unanswered)

    def _note(self, reply: Reply) -> None:
        assert self._unanswered
        self._unanswered = None
        self._unsent = {int(found.data) for found in self._collected.found()}
        self._in_flight |= {each.id: int(each.data) for each in reply.taken}
        self.world.dead += [int(each) for each in reply.died]
        rest = self._collected.batches
        leased = sum(each.leased for each in self.store.shards)
        late = self.store._late.done
        done = sum(len(each.done) for each in rest) + len(late)
        assert leased == len(self._in_flight) + done
        has_ended = any(each.start_ended for each in rest)
        if reply.runs_start and self._start is None and not has_ended:
            self._start = self.world.site.start()
        is_idle = not self._in_flight and not rest and self._start is None
        look = reply.counters if is_idle and reply.is_started and reply.left == 0 else None
        self.is_over = look is not None and look == self._last_look
        self._last_look = look

    def _ended(self) -> None:
        if self.is_over:
            self.store.apply(SharedBatch(is_over=True))
        self.store.leave()


@functools.cache
def a_server() -> servers.Server:
    return servers.Server("valkey", "--save", "", "--appendonly", "no")


ids = random.Random()


def patch(monkeypatch: Any) -> None:
    """Let waits for other crawlers take simulated time, and batches be small."""
    monkeypatch.setattr(making, "_LOCK_MS", LOCK_MS)
    monkeypatch.setattr(filter_module, "_POLL_SECS", 0)
    monkeypatch.setattr(collected, "MAX_BATCH", MAX_BATCH)
    monkeypatch.setattr(collected, "_MOST_KEPT_BYTES", 1 << 20)
    monkeypatch.setattr(secrets, "token_hex", lambda nbytes: ids.randbytes(nbytes).hex())
