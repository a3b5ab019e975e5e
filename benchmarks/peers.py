"""A request, by whole dupefilters: ours, Scrapy's, scrapy-redis's, and the smallest over others."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from scrapy.dupefilters import BaseDupeFilter, RFPDupeFilter
from scrapy.settings import Settings
from scrapy_redis.dupefilter import (  # type: ignore[import-untyped]
    RFPDupeFilter as RedisSetDupeFilter,
)

from benchmarks.shared import contenders, peer_env, samples, servers
from benchmarks.shared.contenders import LIVE, MMAP, RUST, SQLITE, Contender
from benchmarks.shared.peer_env import PYBLOOM_LIVE, PYBLOOMFILTER, RBLOOM, REDIS_BLOOM
from benchmarks.shared.report import Section, Table, quartiles
from benchmarks.shared.timing import PASSES, Times, timed

CAPACITY, ERROR_RATE = 1_000_000, 1e-6
OURS, SCRAPYS = "BloomDupeFilter, JOBDIR", "RFPDupeFilter, JOBDIR"
OURS_IN_REDIS = "BloomDupeFilter, Redis backend"
REDIS_SET = "scrapy-redis's RFPDupeFilter"
MINIMAL = (MMAP, RUST, LIVE, SQLITE)


@dataclass(frozen=True)
class Sizes:
    """Rounds, and requests in each: of most, and of the slow one."""

    rounds: int
    per_round: int
    per_round_slow: int


FULL, QUICK = Sizes(12, 3_000, 100), Sizes(2, 100, 5)


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    sizes = QUICK if quick else FULL
    server_name, times = "", Times()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = dict(_local(place))
        for name, program in servers.programs().items():
            server = stack.enter_context(servers.running(program))
            made |= _in_server(server.url)
            server_name = name
            break
        times = _in_turn(made, sizes)
        for contender in made.values():
            contender.end()
    rows = [
        (
            name,
            *(
                text
                for what in PASSES
                for text in (
                    f"{median(times.micros[name, what]):,.1f}",
                    *map("{:.2f}".format, quartiles(times.ratios(name, SCRAPYS, what))),
                )
            ),
        )
        for name in made
    ]
    against = "times RFPDupeFilter, 25 %"
    head = ("", *(each for what in PASSES for each in (f"{what}, µs", against, "median", "75 %")))
    return Section(
        title="Dupefilters",
        method=(
            "`Request(url)` and `request_seen(request)`, by dupefilters as they are: ours and "
            "Scrapy's with and without a JOBDIR, "
            f"scrapy-redis's with its set{f', in {server_name} on loopback' if server_name else ''}"
            f", and {REDIS_BLOOM}'s; and by the smallest one that asks another filter for the "
            "fingerprint of Scrapy's fingerprinter. Filters are made for "
            f"{CAPACITY:,} requests, those with an error rate for {ERROR_RATE:g}. "
            f"{sizes.rounds} rounds of {sizes.per_round:,} URLs that were not used before "
            f"({sizes.per_round_slow:,} for {REDIS_BLOOM}). Each round times all on the same "
            "URLs, as new requests and then as duplicates, and begins with the next of them. Peers:"
            f" {peer_env.versions(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE, REDIS_BLOOM)}. RFPDupeFilter"
            " in the ratios is that with a JOBDIR."
        ),
        tables=[Table(head, rows)],
        notes="\n".join(_notes(server=bool(server_name))),
    )


def _notes(*, server: bool) -> Iterator[str]:
    yield (
        "`Request(url)` and its fingerprint are part of all times. BloomDupeFilter computes the "
        "fingerprints of Scrapy's fingerprinter itself, with the same results in less time. The "
        "smallest dupefilters do what is shown and nothing else: no growth, no stats, no care for "
        "what a kill or a damaged file leaves."
    )
    yield (
        f"{contenders.SQLITE_TEXT}. {PYBLOOM_LIVE} and rbloom are in memory, and saved at the end."
    )
    if server:
        yield (
            "What a round trip takes depends on where the system runs the server, see the section "
            "on Redis; here it is left to the system. BloomDupeFilter knows the duplicates of this "
            "crawler without one. "
            f"scrapy-redis's fingerprints are its own. {REDIS_BLOOM} takes its defaults: 2**30 "
            "bits, allocated before, and 6 hashes, each a round trip."
        )
    else:
        yield "Nothing with Redis is measured: there is no server."
    yield from peer_env.notes(PYBLOOMFILTER, RBLOOM, PYBLOOM_LIVE, REDIS_BLOOM)


def _local(place: Path) -> Iterator[tuple[str, Contender]]:
    yield OURS, contenders.bloom_dupefilter(place / "ours", CAPACITY)
    yield "BloomDupeFilter", contenders.bloom_dupefilter(None, CAPACITY)
    yield SCRAPYS, _of(RFPDupeFilter.from_crawler(contenders.crawler(place / "scrapys")))
    yield "RFPDupeFilter", _of(RFPDupeFilter.from_crawler(contenders.crawler(None)))
    for name in contenders.present(*MINIMAL):
        yield f"smallest over {name}", contenders.minimal(name, place / name, CAPACITY, ERROR_RATE)


def _in_server(url: str) -> Mapping[str, Contender]:
    ours = contenders.bloom_dupefilter(None, CAPACITY, BLOOM_BACKEND="redis", BLOOM_REDIS_URL=url)
    settings = Settings({"REDIS_URL": url})
    made = {OURS_IN_REDIS: ours, REDIS_SET: _of(RedisSetDupeFilter.from_settings(settings))}
    if REDIS_BLOOM not in peer_env.missing():
        bloom = peer_env.module(REDIS_BLOOM).RFPDupeFilter.from_settings(settings)
        bloom.key = bloom.bf.key = f"bloomfilter:{time.time()}"  # by default that of the set
        bloom.server.setbit(bloom.key, bloom.bf.m - 1, 1)
        made[REDIS_BLOOM] = _of(bloom)
    return made


def _of(dupefilter: BaseDupeFilter) -> Contender:
    dupefilter.open()

    request = contenders.requested(dupefilter)
    return Contender(request, False, end=lambda: dupefilter.close("finished"))


def _in_turn(made: Mapping[str, Contender], sizes: Sizes) -> Times:
    """As that of the filters, but one of them is given less."""
    times = Times()
    order = list(made)
    for number in range(sizes.rounds):
        start = number * sizes.per_round
        urls: Sequence[str] = [samples.url(i) for i in range(start, start + sizes.per_round)]
        for what in PASSES:
            for name in order:
                given = urls[: sizes.per_round_slow] if name == REDIS_BLOOM else urls
                secs, seen = timed(made[name].record, given)
                times.note(name, what, secs / len(given) * 1e6)
                # The hashes of that one are so few that new ones are soon taken for seen.
                wrong = len(given) - seen if what == "duplicate" else seen
                assert wrong <= 1 or name == REDIS_BLOOM, (name, what, wrong)
        order.append(order.pop(0))
    return times
