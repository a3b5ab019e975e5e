"""Log with what a crawl begins, what happens to its queue meanwhile, and what is left."""

import logging

from scrapy import Request
from scrapy.crawler import Crawler

from scrapy_bloom.crawl.scheduler.in_flight import Flight
from scrapy_bloom.crawl.scheduler.order import serves_least_busy_slot
from scrapy_bloom.crawl.scheduler.reachability import MOST_UNREACHABLE
from scrapy_bloom.queues.serialized import url_of
from scrapy_bloom.queues.store import MOST_DEATHS, MOST_TRIES, Opened, QueueStatus, Reply, State
from scrapy_bloom.settings import BloomSettings
from scrapy_bloom.text import counted, escaped, time_text


class QueueLog:
    """Logs what happens to the queue of a crawl in a store of some name."""

    def __init__(self, crawler: Crawler, name: str) -> None:
        extra = {"spider": crawler.spider}
        self._logger = logging.LoggerAdapter(logging.getLogger(__name__), extra)
        self._crawler = crawler
        self._name = name
        self._logged: set[str] = set()  # kinds of messages that are logged once

    def is_first(self, kind: str) -> bool:
        """Return whether a kind of message was not logged yet."""
        is_first = kind not in self._logged
        self._logged.add(kind)
        return is_first

    def log_opening(self, settings: BloomSettings, opened: Opened) -> None:
        """Log the run that a crawl has joined, and what is left of it."""
        for data in opened.died:
            self.log_dead(data)
        run = f" {escaped(opened.run)!r}" if opened.run else ""
        if opened.is_late:
            self._logger.warning(
                "BLOOM_RUN is %r, the name of an earlier run of %s, so there is nothing to do in "
                "the current run%s. To begin a new run, set a name that it has not had",
                escaped(settings.run),
                self._name,
                run,
            )
            return
        pending = sum(opened.counts[state] for state in (State.PENDING, State.SUSPECT))
        failed = opened.counts[State.FAILED] + opened.counts[State.WAITING]
        if opened.began and not opened.is_first:
            others = opened.others
            self._logger.log(
                logging.WARNING if others else logging.INFO,
                "The run%s of %s begins; unfinished requests of earlier runs: %s%s",
                run,
                self._name,
                f"{pending + opened.counts[State.IN_FLIGHT]:,}",
                f". Workers of the run before: {others:,}, which shut down" if others else "",
            )
        if opened.retried:
            self._logger.info(
                "%s of earlier runs: tried again, unless five runs could not crawl it",
                counted(opened.retried, "failed request"),
            )
        elif opened.ended_at and settings.queue_when_empty == "close":
            self._logger.warning(
                "The run%s of %s ended at %s, and nothing is pending%s. To crawl again, set "
                "BLOOM_RUN to a name that it has not had, for example the date",
                run,
                self._name,
                time_text(opened.ended_at),
                f" (failed requests are for the next run: {failed:,})" if failed else "",
            )
        if settings.shares_queue:
            self._log_joining(settings, pending)
        elif pending and not opened.began:
            killed = opened.killed
            self._logger.info(
                "Resuming crawl (%d requests scheduled%s)",
                pending,
                f", {killed:,} of them in flight when the last process was killed"
                if killed
                else "",
            )

    def _log_joining(self, settings: BloomSettings, pending: int) -> None:
        if settings.queue_when_empty == "wait":
            self._logger.info(
                "The workers of the queue in %s stay open when it is empty (BLOOM_QUEUE_WHEN_EMPTY "
                'is "wait"). To end them, run `scrapy bloom stop`, or press Ctrl-C; pending '
                "requests: %s",
                self._name,
                f"{pending:,}",
            )
        elif pending:
            self._logger.info(
                "Joining the crawl of the queue in %s: pending requests: %s",
                self._name,
                f"{pending:,}",
            )

    def log_limits(self, settings: BloomSettings) -> None:
        """Log whether the limits of downloads per host hold for all workers together."""
        if not settings.shared_limits:
            return
        if serves_least_busy_slot(self._crawler):
            self._logger.info(
                "The limits of downloads per host (CONCURRENT_REQUESTS_PER_DOMAIN, DOWNLOAD_DELAY, "
                "DOWNLOAD_SLOTS) apply to all workers of the queue in %s together "
                "(BLOOM_SHARED_LIMITS)",
                self._name,
            )
            return
        self._logger.warning(
            "The limits of downloads per host apply to each worker of the queue in %s separately, "
            "because SCHEDULER_PRIORITY_QUEUE is not "
            '"scrapy.pqueues.DownloaderAwarePriorityQueue", which tells hosts apart. So each '
            "further worker adds to the load of a host: set CONCURRENT_REQUESTS_PER_DOMAIN and "
            "DOWNLOAD_DELAY for the number of workers, and BLOOM_SHARED_LIMITS = False",
            self._name,
        )

    def log_no_share(self, workers: int) -> None:
        """Log that a worker takes no requests, because others have the limits of all hosts."""
        if self.is_first("no share"):
            self._logger.info(
                "This worker waits, because the %d workers of the queue in %s share the limits per "
                "host (BLOOM_SHARED_LIMITS), and it has no share of a host with pending requests",
                workers,
                self._name,
            )

    def log_reply(self, reply: Reply) -> None:
        """Log which requests are no longer crawled in this run, and which leases have expired."""
        for data in reply.died:
            self.log_dead(data)
        if reply.given_up:
            self._logger.error(
                "%s failed in five runs, and %s no longer tried: `scrapy bloom queue --dead` "
                "shows why",
                counted(reply.given_up, "request has", "requests have"),
                "is" if reply.given_up == 1 else "are",
            )
        for data in reply.circles:
            self._logger.warning(
                "%s was redirected to a page that waits for it, because that was redirected to it: "
                "the next run tries both again",
                escaped(url_of(data)),
            )
        for worker, number in reply.expired.items():
            self._logger.info(
                "The lease of the worker %s of the queue in %s has expired without a heartbeat: %s "
                "pending again",
                escaped(worker),
                self._name,
                counted(number, "request is", "requests are"),
            )

    def log_dead(self, data: bytes) -> None:
        """Log that a request is no longer crawled, because processes died with it."""
        self._logger.error(
            "%s was in flight in %d processes that died, the last time alone: it is no longer "
            "crawled. It is kept in %s: `scrapy bloom queue --dead` shows it",
            escaped(url_of(data)),
            MOST_DEATHS + 1,
            self._name,
        )

    def log_end(self, closed: QueueStatus) -> None:
        """Log what is left for the next process; the last worker does so."""
        pending = closed.counts[State.PENDING] + closed.counts[State.SUSPECT]
        failed = closed.counts[State.FAILED] + closed.counts[State.WAITING]
        if pending or not closed.ended_at:
            self._logger.info(
                "The crawl of the queue in %s is unfinished; pending requests: %s, failed "
                "requests: %s. Run the same command again to resume it",
                self._name,
                f"{pending:,}",
                f"{failed:,}",
            )
        elif failed:
            self._logger.info(
                "The crawl of the queue in %s finished, with %s. The next run, which a new "
                "BLOOM_RUN begins, or the same command if it sets none, tries those again that "
                "have failed in fewer than five runs; `scrapy bloom queue --failed` shows them",
                self._name,
                counted(failed, "failed request"),
            )

    def log_shutdown(self, reply: Reply) -> None:
        """Log why this worker shuts down, although requests may be left."""
        self._logger.info(
            "This worker of the queue in %s shuts down, because %s",
            self._name,
            "scrapy bloom stop was run" if reply.is_stopped else "another run has begun",
        )

    def log_rejoined(self, number: int) -> None:
        """Log that this worker had to join the queue again."""
        self._logger.info(
            "This worker has rejoined the queue in %s, because its lease had expired or the server "
            "had lost it: at least %s crawled again, by this worker or another",
            self._name,
            counted(number, "request is", "requests are"),
        )

    def log_in_memory(self, request: Request, reason: Exception) -> None:
        """Log the first request that cannot be serialized, as Scrapy does it."""
        if self.is_first("unserializable"):
            self._logger.warning(
                "Unable to serialize request: %(request)s - reason: %(reason)s - it is kept in "
                "memory, and if this process dies, the pages that link to it are crawled again - "
                "no more unserializable requests will be logged (stats being collected)",
                {"request": request, "reason": reason},
                exc_info=reason if self._crawler.settings.getbool("SCHEDULER_DEBUG") else None,
            )

    def log_unreadable(self, error: Exception) -> None:
        """Log the first request that cannot be deserialized, of each kind of error."""
        name = type(error).__name__
        if self.is_first(f"unreadable {name}"):
            self._logger.error(
                "A request of the job cannot be deserialized, and stays in %s: %s: %s. Further "
                "requests with a %s are not logged, but counted in scheduler/unreadable",
                self._name,
                name,
                escaped(str(error)),
                name,
            )

    def log_failed(self, flight: Flight, *, is_last: bool) -> None:
        """Log the first request that has failed, perhaps in the last of its runs."""
        if self.is_first("failed"):
            self._logger.info(
                "%s has failed (%s), and is %s. Further failed requests are not logged, but "
                "counted in scheduler/failed; `scrapy bloom queue --failed` shows them",
                escaped(flight.url),
                escaped(flight.reason),
                f"not tried again, because it has failed in {MOST_TRIES} runs"
                if is_last
                else "kept for the next run",
            )

    def log_unreachable(self, reason: str) -> None:
        """Log that nothing can be downloaded any more."""
        self._logger.error(
            "The last %d downloads failed without a response, the last one with %s. The spider is "
            "closed (reason bloom_unreachable), so that not all requests fail: check name "
            "resolution, network and proxies, and start the crawl again",
            MOST_UNREACHABLE,
            escaped(reason),
        )
