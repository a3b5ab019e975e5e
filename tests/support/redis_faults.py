"""What a fault of Redis in the middle of a crawl needs: the middle, the fault, and what came of it.

The middle is certain: the site answers so many pages and holds back all others, the fault is made,
and only then the rest is answered.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support import servers
from tests.support.crawls import Crawl
from tests.support.proxies import DroppingProxy
from tests.support.sites import ScriptedSite, Site, tree_site

PASSWORD = "geheim-8Y2k"  # of every server, and in every URL: no log may show it
KEY = "links:bloom"
SHORT, LONG = 1, 60  # seconds: deadlines that a fault lasts for, or not
# Seconds without an answer that tell of a stalled server: a busy machine stands still for less.
STALLED = 4
WAITED = (
    "(waited up to 1 seconds, BLOOM_REDIS_DEADLINE_SECS); check that the server runs, has room, "
    "and that BLOOM_REDIS_URL is right"
)
CLOSED = (
    "The spider is closed (reason bloom_outage), and requests that are still under way are crawled "
    "unfiltered; start the crawl again"
)
PASSED = "Requests are crawled unfiltered until "


class GatedSite:
    """A site of pages /p/0, /p/1, ... that answers so many, and holds back all others for a while.

    What is held back has links that no one knows yet, so that the filter is asked again as soon
    as the gate is opened.
    """

    def __init__(self, site: Site, pages: set[str], gate: int, *, known_as: int = 1) -> None:
        self.pages = pages
        self.site = site
        self._known_as = known_as  # so many addresses of the start page, which all are crawled
        site.hold_after(gate)

    def is_reached(self) -> bool:
        return self.site.is_holding()

    def open(self) -> None:
        self.site.release()

    def missing(self) -> set[str]:
        return self.pages - set(self.site.hits)

    def repeats(self) -> int:
        """How many pages were crawled again, because the filter had lost or not got them."""
        return self.site.total() - len(self.site.hits) - (self._known_as - 1)

    def end(self) -> None:
        self.open()
        self.site.end()


def gated_tree(pages: int = 90, gate: int = 20) -> GatedSite:
    """Each page has links to its children, to its parent and to the start."""
    # "/" as the start, which is not recorded, and as a link; and "/p/0".
    return GatedSite(tree_site(pages), {f"/p/{n}" for n in range(pages)}, gate, known_as=3)


def gated_cascade(pages: int = 90, gate: int = 20) -> GatedSite:
    """Each page has links to later ones only: also a crawl without any filter comes to an end."""
    names = ["/", *(f"/p/{n}" for n in range(1, pages))]
    answers: dict[str, list] = {
        name: [tuple(names[m] for m in (2 * n + 1, 2 * n + 2, 4 * n + 3) if m < pages)]
        for n, name in enumerate(names)
    }
    return GatedSite(ScriptedSite(answers), set(names), gate)


class WatchedProxy(DroppingProxy):
    """Shows that a client tried: what it got, and how often it came anew.

    Attributes:
        delays: seconds that replies take: one after the other, and from the first again.
        replies: number of replies, also of dropped ones.
        connections: number of connections.
    """

    def __init__(self, server: servers.Server, rate: float = 0.0, seed: int = 1) -> None:
        self.delays = [0.0]
        self.replies = self.connections = 0
        super().__init__(server.port, rate, seed)

    def tries(self) -> int:
        return self.replies + self.connections

    def _greeted(self, client: Any) -> Any:
        self.connections += 1
        return super()._greeted(client)

    def _drops(self, asked: bytes) -> bool:
        time.sleep(self.delays[self.replies % len(self.delays)])
        self.replies += 1
        return super()._drops(asked)


def locked_server(*options: str) -> servers.Server:
    return servers.Server("valkey", "--requirepass", PASSWORD, *options)


def admin(server: servers.Server) -> redis.Redis:
    """Somebody else at the same server."""
    # A server that is shut down does not answer: nothing to be tried again.
    return redis.Redis(port=server.port, password=PASSWORD, retry=Retry(NoBackoff(), 0))


def blocks(server: servers.Server) -> list[bytes]:
    return admin(server).keys(f"{{{KEY}}}:blocks:*")


@contextmanager
def restarted_and_loading(server: servers.Server) -> Iterator[Callable[[], object]]:
    """Killed, with all its data saved, and started again: it loads until it is told to end that."""
    client = admin(server)
    client.mset({f"other:{number}": "x" * 30 for number in range(16_000)})
    client.save()
    server.kill()
    restart = threading.Thread(target=server.start)
    restart.start()

    def load() -> None:
        client.config_set("key-load-delay", 0)
        restart.join()

    try:
        servers.wait_for(lambda: _is_loading(server), lambda: "it does not load")
        yield load
    finally:
        restart.join()


# It takes half a minute for what is put into it above, with a word to its clients twice a second.
SLOW_TO_LOAD = ("--key-load-delay", "2000", "--loading-process-events-interval-bytes", "1024")


def _is_loading(server: servers.Server) -> bool:
    try:
        return bool(admin(server).info("persistence")["loading"])
    except redis.ConnectionError as error:  # also that it is loading, when the password is sent
        return isinstance(error, redis.exceptions.BusyLoadingError)


def url_of(place: servers.Server | DroppingProxy | int, user: str = "") -> str:
    port = place if isinstance(place, int) else place.port
    return f"redis://{user}:{PASSWORD}@127.0.0.1:{port}/0"


def patient_url_of(place: servers.Server | DroppingProxy) -> str:
    """With a deadline of a second, only what is refused is an outage, or a stall of seconds."""
    return f"{url_of(place)}?socket_timeout={STALLED}"


def start(site: GatedSite, url: str, work_dir: Path, **settings: Any) -> Crawl:
    settings = {
        "BLOOM_BACKEND": "redis",
        "BLOOM_REDIS_URL": url,
        "BLOOM_REDIS_DEADLINE_SECS": LONG,
        "BLOOM_EXPECTED_REQUESTS": 5000,
        **settings,
    }
    return Crawl(site.site.url, work_dir, settings)


def start_until_the_middle(site: GatedSite, url: str, work_dir: Path, **settings: Any) -> Crawl:
    crawl = start(site, url, work_dir, **settings)
    crawl.wait_until(site.is_reached)
    return crawl


def ended(crawl: Crawl, reason: str = "finished") -> dict[str, float]:
    """Wait for the end of a crawl that has begun; its stats about the filter.

    However it goes, a crawl that has begun ends with exit status 0 and its reason in the stats,
    shows no traceback and no password.
    """
    assert crawl.finish() == 0, crawl.output
    assert f"'finish_reason': '{reason}'" in crawl.output, crawl.output
    assert "Traceback" not in crawl.output, crawl.output
    assert PASSWORD not in crawl.output
    found = re.findall(r"'(bloom/[\w/]+)': ([\d.e+-]+)", crawl.output)
    return {name: float(value) for name, value in found}


def told(crawl: Crawl, *levels: str) -> list[str]:
    """What the user reads from the filter, of these levels, with SERVER for the URL."""
    lines = [line for level in levels for line in crawl.told(level)]
    texts = [line.split(": ", 1)[1] for line in lines]
    return [re.sub(r"redis://127\.0\.0\.1:\d+/0", "SERVER", text) for text in texts]


def tells_of_one_outage(crawl: Crawl) -> bool:
    """Return whether the log says that one outage began and ended, and of nothing else."""
    (warning,) = told(crawl, "WARNING", "ERROR", "CRITICAL")
    return (
        warning.startswith("SERVER does not answer: ")
        and sum("SERVER is back after " in line for line in told(crawl, "INFO")) == 1
    )


def is_quiet(crawl: Crawl) -> bool:
    return not told(crawl, "WARNING", "ERROR", "CRITICAL")
