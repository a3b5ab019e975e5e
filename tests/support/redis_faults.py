"""What a fault of Redis during a crawl needs: the server, the crawl, and what the user reads."""

import re
import threading
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
from tests.support.sites import Site

PASSWORD = "geheim-8Y2k"  # of every server, and in every URL: no log may show it
KEY = "links:bloom"
SHORT, LONG = 1, 60  # seconds: deadlines that a fault lasts for, or not
# Seconds without an answer that tell of a stalled server: a busy machine stands still for less.
STALLED = 4
WAITED = (
    "(waited up to 1 seconds, BLOOM_REDIS_DEADLINE_SECS); check that the server runs, has room, "
    "and that BLOOM_REDIS_URL is right"
)


class WatchedProxy(DroppingProxy):
    """Counts the attempts of a client.

    Attributes:
        tries: number of replies, also of dropped ones, and of connections.
    """

    def __init__(self, server: servers.Server, rate: float = 0.0) -> None:
        self.tries = 0
        super().__init__(server.port, rate, seed=1)

    def _greeted(self, client: Any) -> Any:
        self.tries += 1
        return super()._greeted(client)

    def _drops(self, asked: bytes) -> bool:
        self.tries += 1
        return super()._drops(asked)


def locked_server(*options: str) -> servers.Server:
    return servers.Server("valkey", "--requirepass", PASSWORD, *options)


def admin(server: servers.Server) -> redis.Redis:
    """Connect to the server as another client, which tries nothing again."""
    return redis.Redis(port=server.port, password=PASSWORD, retry=Retry(NoBackoff(), 0))


@contextmanager
def restarted_and_loading(server: servers.Server) -> Iterator[Callable[[], object]]:
    """Kill a server with its data saved, and restart it; it loads until the result is called."""
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
    """Return a URL for a short deadline: only a stall of seconds is a missing answer."""
    return f"{url_of(place)}?socket_timeout={STALLED}"


def start(
    site: Site, url: str, work_dir: Path, *, held_after: int | None = None, **settings: Any
) -> Crawl:
    """Start a crawl with its filter at a URL; wait until the site holds back, if it shall."""
    settings = {
        "BLOOM_BACKEND": "redis",
        "BLOOM_REDIS_URL": url,
        "BLOOM_REDIS_DEADLINE_SECS": LONG,
        "BLOOM_EXPECTED_REQUESTS": 5000,
        **settings,
    }
    if held_after is None:
        return Crawl(site.url, work_dir, settings)
    return Crawl.held(site, held_after, work_dir, settings)


def ended(crawl: Crawl, reason: str = "finished") -> dict[str, float]:
    """Wait for the end of a crawl that has begun; return its stats about the filter.

    It ends with exit status 0 and its reason in the stats, without a traceback or a password.
    """
    assert crawl.finish() == 0, crawl.output
    assert f"'finish_reason': '{reason}'" in crawl.output, crawl.output
    assert "Traceback" not in crawl.output, crawl.output
    assert PASSWORD not in crawl.output
    found = re.findall(r"'(bloom/[\w/]+)': ([\d.e+-]+)", crawl.output)
    return {name: float(value) for name, value in found}


def problems(crawl: Crawl, *levels: str) -> list[str]:
    """Return our log lines of these levels, by default all problems, with SERVER for the URL."""
    lines = [
        line for level in levels or ("WARNING", "ERROR", "CRITICAL") for line in crawl.told(level)
    ]
    texts = [line.split(": ", 1)[1] for line in lines]
    return [re.sub(r"redis://127\.0\.0\.1:\d+/0", "SERVER", text) for text in texts]


def reports_one_outage(crawl: Crawl) -> bool:
    """Return whether the log says that one outage began and ended, and of nothing else."""
    (warning,) = problems(crawl)
    return (
        warning.startswith("SERVER does not answer: ")
        and sum("SERVER is back after " in line for line in problems(crawl, "INFO")) == 1
    )
