"""Workers that share a queue, and what is done to them in mid-crawl: kills, stops, lost replies."""

import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.crawls import are_finished, is_reached
from tests.support.example_crawls import PART, TINY, ExampleSite, Job, Usual, undisturbed
from tests.support.proxies import DroppingProxy
from tests.support.servers import Cluster, Master, Server
from tests.support.sites import Site, python_doc_site

LEASE_SECS = 3
OURS = "CrashSafeScheduler"
WORKERS = 4
AT_ONCE = 3
DROPPED = 0.02
NOT_COUNTED = "/robots.txt"  # each worker asks for it
GROWS, ENOUGH = 100, 5000  # requests that the filter is made for
QUEUE = "{docs:bloom}:pending"
BACK_SECS, WINDOW_SECS = 20.0, 2
_WINDOW = {"BLOOM_WINDOW_SECS": WINDOW_SECS}
EXAMPLE, DOC = "the example site", "python3-doc"
_SCRAPYS = {
    "JOBDIR": None,
    "SCHEDULER": "scrapy.core.scheduler.Scheduler",
    "DUPEFILTER_CLASS": "scrapy.dupefilters.RFPDupeFilter",
}


def settings_of(url: str, expected: int, **more: object) -> Mapping[str, object]:
    """Return the settings of a worker."""
    return {
        "JOBDIR": None,
        "LOG_LEVEL": "INFO",
        "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
        "DUPEFILTER_CLASS": "scrapy_bloom.BloomDupeFilter",
        "BLOOM_QUEUE_LEASE_SECS": LEASE_SECS,
        "BLOOM_REDIS_URL": url,
        "BLOOM_EXPECTED_REQUESTS": expected,
        **more,
    }


class Crowd:
    """Workers that share a queue, each of which can be killed and started again."""

    def __init__(self, directory: Path, url: str, settings: Mapping[str, object]) -> None:
        self.workers = [Job(directory / f"worker-{n}", url, settings) for n in range(WORKERS)]
        for worker in self.workers:
            worker.start()

    def end(self) -> None:
        """Kill those that run."""
        for worker in self.workers:
            worker.run.kill()

    def is_reached(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if a worker ends before."""
        runs = [worker.run for worker in self.workers]
        return is_reached(condition, runs) and all(run.running() for run in runs)

    def journal(self) -> Counter[str]:
        """Return the lines of all journals, and how often each is there."""
        return sum((Counter(worker.lines()) for worker in self.workers), Counter())

    def tracebacks(self) -> int:
        """Count the tracebacks in all logs."""
        logs = (log for worker in self.workers for log in worker.directory.glob("*.log"))
        return sum(log.read_text(errors="replace").count("\nTraceback") for log in logs)


@dataclass(frozen=True)
class Kind:
    """What is done in mid-crawl."""

    name: str  # for people
    # does it to workers and their server, and returns the workers that it killed
    do: Callable[[Crowd, Any, random.Random], Sequence[Job]]
    is_kill: bool = True  # whether it is one of the kills at random
    # what the workers' server is: "server", "replicated", "cluster" or "proxy"
    place: str = "server"
    # of the workers, which only ours have
    settings: Mapping[str, object] = field(default_factory=dict)
    kills_all: bool = False  # whether no worker is left that could end the crawl


@dataclass(frozen=True)
class Case:
    """One crawl."""

    kind: Kind
    name: str  # of the scheduler
    site: str
    grows: bool  # whether the filter has to
    again: bool  # whether the workers that were killed are started again
    number: int  # among its like
    settings: Callable[..., Mapping[str, object]] = settings_of


@dataclass(frozen=True)
class Outcome:
    """What became of a crawl."""

    case: Case
    at: int  # requests that were answered when it was disturbed
    killed: int  # workers
    missing: Sequence[str]  # addresses that were never asked for, and lines of the journals
    twice: int  # requests for what had been asked for
    items_twice: int  # that came through a pipeline again
    has_ended: bool  # each worker that was not killed for good ended by itself, and was finished
    tracebacks: int  # in the logs
    directory: Path  # of the logs

    @property
    def is_complete(self) -> bool:
        """Whether every page was crawled, and its item was there."""
        return not self.missing

    @property
    def description(self) -> str:
        """A line for people."""
        return (
            f"{self.case.site}, after {self.at} requests: "
            f"{'ended' if self.has_ended else 'not ended'}, {len(self.missing)} missing "
            f"{self.missing[:3]}, {self.twice} crawled twice, {self.tracebacks} tracebacks; "
            f"{self.directory}"
        )


def _kill(crowd: Crowd, _: Any, rng: random.Random, number: int) -> Sequence[Job]:
    victims = rng.sample(crowd.workers, number)
    for worker in victims:
        worker.run.send(signal.SIGKILL)
    for worker in victims:
        worker.run.kill()
    return victims


def _stop(crowd: Crowd, _: Any, rng: random.Random) -> Sequence[Job]:
    (worker,) = rng.sample(crowd.workers, 1)
    worker.run.send(signal.SIGSTOP)
    time.sleep(2 * LEASE_SECS)
    worker.run.send(signal.SIGCONT)
    return ()


def _kill_server(_: Crowd, server: Server, rng: random.Random) -> Sequence[Job]:
    server.restart(rng.uniform(0, 1))
    return ()


def _empty(_: Crowd, server: Server, __: random.Random) -> Sequence[Job]:
    server.client.flushall()
    return ()


def _set_back(_: Crowd, server: Server, rng: random.Random) -> Sequence[Job]:
    """Restart the server as it was some seconds ago."""
    server.keep()
    time.sleep(rng.uniform(0, BACK_SECS))
    server.restart(is_set_back=True)
    return ()


def _replace(_: Crowd, server: Master, rng: random.Random) -> Sequence[Job]:
    """Kill the server, and have its replica take over without the latest changes."""
    server.promote()
    time.sleep(rng.uniform(0, 0.5))
    server.kill()
    server.be_replaced()
    return ()


def _kill_master(_: Crowd, cluster: Cluster, __: random.Random) -> Sequence[Job]:
    cluster.master_of(QUEUE).kill()
    return ()


def _set_back_master(_: Crowd, cluster: Cluster, rng: random.Random) -> Sequence[Job]:
    """Restart a node, which has no append-only file, from a snapshot."""
    server = cluster.master_of(QUEUE)
    server.client.save()
    time.sleep(rng.uniform(0, BACK_SECS))
    server.restart()
    return ()


def _nothing(_: Crowd, __: Any, ___: random.Random) -> Sequence[Job]:
    return ()


KINDS = (
    Kind("SIGKILL of one worker", partial(_kill, number=1)),
    Kind("SIGKILL of two workers", partial(_kill, number=2)),
    Kind("SIGKILL of all, then again", partial(_kill, number=WORKERS), kills_all=True),
    Kind("SIGKILL of the server", _kill_server),
    Kind("SIGSTOP of one for two leases", _stop, is_kill=False),
    Kind(f"{DROPPED:.0%} of the replies dropped", _nothing, is_kill=False, place="proxy"),
    Kind("the server emptied", _empty, is_kill=False),
    Kind(f"the server set back by up to {BACK_SECS:g} s", _set_back, is_kill=False),
    Kind("the server killed, its replica takes over", _replace, False, "replicated"),
    Kind(f"a window of {WINDOW_SECS} s", _nothing, False, settings=_WINDOW),
    Kind("a master of a Cluster killed", _kill_master, is_kill=False, place="cluster"),
    Kind("a master of a Cluster set back", _set_back_master, is_kill=False, place="cluster"),
)


def outcomes(cases: Sequence[Case], quiet_secs: float, *, quick: bool) -> Sequence[Outcome]:
    """Crawl them all, some at once. What is wrong with ours stays in its directory."""
    seed = random.SystemRandom().randrange(10**6)
    directory = Path(tempfile.mkdtemp(prefix="workers-"))
    size = TINY if quick else PART
    serve: dict[str, Callable[[], Site]] = {
        EXAMPLE: lambda: ExampleSite(size),
        DOC: python_doc_site,
    }
    usual = {}
    for name in dict.fromkeys(case.site for case in cases):
        with serve[name]() as site:
            usual[name] = undisturbed(site, directory / name, _SCRAPYS)
        shutil.rmtree(directory / name)

    def outcome(case: Case) -> Outcome:
        # Again, if the crawl was over before anything was done to it.
        for attempt in range(20):
            what = f"{case.kind.name} {case.number} {attempt}"
            place = directory / re.sub(r"\W+", "-", f"{case.name} {what}")
            rng = random.Random(f"{seed} {what}")
            with serve[case.site]() as site:
                found = _disturbed(place, site, usual[case.site], rng, quiet_secs, case)
            if case.name != OURS or not found or (found.is_complete and found.has_ended):
                shutil.rmtree(place)
            if found:
                print(f"{what}: {found.description}", flush=True)
                return found
        raise TimeoutError(f"{case} ended before each instant")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(outcome, cases))
    if not any(directory.iterdir()):
        directory.rmdir()
    return found


def _disturbed(
    directory: Path,
    site: Site,
    usual: Usual,
    rng: random.Random,
    quiet_secs: float,
    case: Case,
) -> Outcome | None:
    with ExitStack() as stack:
        server, url = stack.enter_context(_served(case.kind.place, rng))
        expected = GROWS if case.grows else ENOUGH
        settings = case.settings(url, expected, **case.kind.settings)
        crowd = Crowd(directory, site.url, settings)
        stack.callback(crowd.end)
        # Where it is so from the beginning, there may be no middle.
        at = 1 if case.kind.do is _nothing else rng.random() * len(usual.addresses)
        if not crowd.is_reached(lambda: site.total() >= at):
            return None
        time.sleep(rng.uniform(0, 0.02))
        if not crowd.is_reached(lambda: True):
            return None
        asked = site.total()
        killed = case.kind.do(crowd, server, rng)
        living = [worker for worker in crowd.workers if worker not in killed]
        if case.again and killed:
            time.sleep(rng.uniform(0, 1.5 * LEASE_SECS))
            for worker in killed:
                worker.start()
            living = crowd.workers
        has_ended = are_finished([worker.run for worker in living], site.total, quiet_secs)
        journal = crowd.journal()
        unnoted = {line.partition(" ")[2] for line in usual.journal - set(journal)}
        return Outcome(
            case=case,
            at=asked,
            killed=len(killed),
            missing=sorted(unnoted | usual.addresses - set(site.hits)),
            twice=sum(n - 1 for hit, n in site.hits.items() if hit != NOT_COUNTED),
            items_twice=sum(n - 1 for line, n in journal.items() if line.startswith("item ")),
            has_ended=has_ended,
            tracebacks=crowd.tracebacks(),
            directory=directory,
        )


@contextmanager
def _served(place: str, rng: random.Random) -> Iterator[tuple[Server | Cluster, str]]:
    """Start a server; yield it, and the URL for the workers."""
    server: Server | Cluster
    with ExitStack() as stack:
        if place == "cluster":
            server = Cluster(with_replicas=True)
            for replica in server.replicas:
                replica.client.config_set("cluster-replica-no-failover", "no")
        elif place == "replicated":
            server = Master("valkey", "--appendonly", "yes")
        else:
            server = Server("valkey", "--appendonly", "yes")
        stack.callback(server.end)
        url = server.url
        if place == "proxy":
            assert isinstance(server, Server)
            proxy = DroppingProxy(server.port, DROPPED, rng.randrange(10**6))
            stack.callback(proxy.end)
            url = f"redis://127.0.0.1:{proxy.port}/0"
        yield server, url
