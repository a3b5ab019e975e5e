"""Filter and queue share their fate: what a server has lost is not seen any more."""

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import servers
from backends import redis_backend
from crawls import SCRAPY_REDIS, SHARED_SPIDER, SUPPORT, Crawl
from redis_filters import fps, messages
from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.redis.backend import RedisBackend
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.keys.store import RedisStore
from sites import ScriptedSite, tree_site

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks import restarts

WARNING, INFO = logging.WARNING, logging.INFO
VALKEY = Path(servers.PROGRAMS["valkey"])


@pytest.mark.parametrize("way", restarts.WAYS, ids=lambda way: way.name.replace(" ", "-"))
def test_every_page_is_crawled(way: restarts.Way, tmp_path: Path) -> None:
    outcome = restarts.crawl(
        way, restarts.OURS, tmp_path / "crawl", pages=150, workers=2, seed=way.name, program=VALKEY
    )
    assert outcome.has_ended
    assert outcome.missing == []
    assert all(len(lines) <= 1 for lines in outcome.warnings), outcome.warnings
    if way.name in {"killed, back empty", "flushed, not killed"}:
        (warning, *_) = (line for lines in outcome.warnings for line in lines)
        assert "an empty filter was begun" in warning
    else:
        assert outcome.warnings == [[], []]


def test_what_a_mirror_took_for_seen_after_the_loss_is_scheduled_again(tmp_path: Path) -> None:
    """The last page links to one that was in the lost queue: then the spider is idle."""
    shutil.copy(SUPPORT / "mirror_trusting.py", tmp_path)
    server = servers.Server()
    site = ScriptedSite({"/": [("/a", "/b", "/c", "/d")]})
    site.answers |= {f"/{name}": [("/a", "/b", "/c", "/d")] for name in "abcd"}
    settings = {
        **SCRAPY_REDIS,
        "DUPEFILTER_CLASS": "mirror_trusting.MirrorTrusting",
        "REDIS_URL": server.url,
        "CONCURRENT_REQUESTS": 1,
        "IDLE_SECS": 0,
    }
    crawl = Crawl.held(site, 1, tmp_path, settings, spider=SHARED_SPIDER)
    # One of the four is asked for, the other three are in the queue.
    crawl.wait_until(lambda: server.client.zcard("shared:requests") == 3)
    server.client.flushall()
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert "Scheduled again" in crawl.output
    assert "should the queue alone be lost" not in crawl.output
    assert set(site.hits) == {"/", "/a", "/b", "/c", "/d"}
    assert len(crawl.told("WARNING")) == 1
    assert not crawl.told("ERROR")
    site.end()
    server.end()


def test_a_server_that_was_cut_off_between_recording_and_queueing(tmp_path: Path) -> None:
    server = servers.Server("valkey", "--appendonly", "yes")
    site = ScriptedSite({"/": [("/a", "/b", "/c", "/d")]})
    settings = {
        **SCRAPY_REDIS,
        "REDIS_URL": server.url,
        "CONCURRENT_REQUESTS": 1,
        "IDLE_SECS": 0,
    }
    site.answers |= {f"/{name}": [("/", "/a", "/b", "/c", "/d")] for name in "abcd"}
    crawl = Crawl.held(site, 1, tmp_path, settings, spider=SHARED_SPIDER)
    crawl.wait_until(lambda: server.client.zcard("shared:requests") == 3)
    # As if the last one had not come so far.
    (last,) = (
        each
        for each in server.client.zrange("shared:requests", 0, -1)
        if site.url.encode() + (b"d" if "/d" not in site.hits else b"c") in each
    )
    server.client.zrem("shared:requests", last)
    server.kill()
    server.start()
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert set(site.hits) == {"/", "/a", "/b", "/c", "/d"}
    assert not crawl.told("ERROR")
    site.end()
    server.end()


def test_a_queue_on_another_server(tmp_path: Path) -> None:
    """The filter's may lose all: pages are crawled again. Of the queue's, a line at the start."""
    queue, own = servers.Server(), servers.Server()
    site = tree_site(pages=60)
    settings = {
        **SCRAPY_REDIS,
        "BLOOM_REDIS_URL": own.url,
        "REDIS_URL": queue.url,
        "IDLE_SECS": 0,
    }
    crawl = Crawl.held(site, 20, tmp_path, settings, spider=SHARED_SPIDER)
    restart_empty(own)
    site.release()
    assert crawl.finish() == 0, crawl.output
    assert len(site.hits) == 60
    (line,) = (line for line in crawl.told("INFO") if "should the queue alone be lost" in line)
    assert queue.url in line
    assert own.url in line
    site.end()
    queue.end()
    own.end()


def opened(url: str, *, trust_secs: float = 0.0, **options: object) -> RedisBackend:
    kinds = {name: options.pop(name) for name in ("cluster", "sentinel") if name in options}
    server = RedisServer(url, deadline_secs=20, identified=True, **kinds)
    options = {"capacity": 2000, "error_rate": 1e-12, "queue_is_shared": True, **options}
    backend = redis_backend(server, "k", trust_secs=trust_secs, **options)
    backend.open()
    backend.begin()
    return backend


def restart_empty(server: servers.Server) -> None:
    server.kill()
    server.start()


def flush(server: servers.Server) -> None:
    server.client.flushall()


LOSSES = pytest.mark.parametrize("lose", [restart_empty, flush])


class TestAllIsLost:
    @LOSSES
    def test_nothing_is_written_back(
        self,
        lose: Callable[[servers.Server], None],
        server: servers.Server,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """Also not what had grown, nor the key that the first command has made."""
        first, late = (opened(server.url, capacity=1000) for _ in range(2))
        for number, fingerprint in enumerate(fps(3000)):
            assert (first, late)[number % 2].add(fingerprint)
        lose(server)
        # What is new, what only the other knew, and what both of them knew.
        assert all(first.add(fingerprint) for fingerprint in [b"new", *fps(2990, 3000), *fps(10)])
        assert len(messages(caplog, WARNING)) == 1
        caplog.clear()
        # The other comes late, and goes on with what the first has begun.
        late.confirm()
        assert not late.add(b"new")
        assert not any(late.add(fingerprint) for fingerprint in fps(2990, 3000))
        assert all(late.add(fingerprint) for fingerprint in fps(10, 20))
        assert len(messages(caplog, WARNING)) <= 1
        assert not any(first.add(fingerprint) for fingerprint in fps(20))
        stored = RedisStore(first.server, "k").read()
        assert not stored.left_over
        (generation,) = stored.generations
        assert set(server.client.keys()) == {b"k", f"k:{generation.id}:0".encode()}
        first.close()
        late.close()

    @LOSSES
    def test_it_happens_again(
        self,
        lose: Callable[[servers.Server], None],
        server: servers.Server,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        backend = opened(server.url)
        for number in range(1, 4):
            assert all(backend.add(fingerprint) for fingerprint in fps(100))
            assert not any(backend.add(fingerprint) for fingerprint in fps(100))
            lose(server)
            backend.confirm()
            assert fps(1)[0] not in backend
            assert len(messages(caplog, WARNING)) == number
        backend.close()

    def test_the_server_is_away_again_before_another_filter_is_begun(
        self, server: servers.Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        backend = opened(server.url)
        assert all(backend.add(fingerprint) for fingerprint in fps(10))

        def is_away() -> None:
            raise OutageError("away", since=0.0)

        flush(server)
        with monkeypatch.context() as patched:
            patched.setattr(backend._shared, "join", is_away)
            for _ in range(2):
                with pytest.raises(OutageError):
                    backend.add(fps(1)[0])
        assert backend.add(fps(1)[0])
        backend.close()

    def test_a_server_that_does_not_say_who_it_is(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        """INFO is not among the rights that the filter needs."""
        rights = "~* +@read +@write +@connection +@transaction +time -info"
        for _ in range(2):
            server.client.execute_command("ACL SETUSER", "me", "on", ">pw", *rights.split())
            backend = opened(server.url.replace("//", "//me:pw@"))
            assert all(backend.add(fingerprint) for fingerprint in fps(100))
            server.kill()
            server.start()
            server.client.execute_command("ACL SETUSER", "me", "on", ">pw", *rights.split())
            assert all(backend.add(fingerprint) for fingerprint in fps(100))
            assert len(messages(caplog, WARNING)) == 1
            caplog.clear()
            backend.close()
            server.client.flushall()


class TestSomeIsLost:
    def test_as_of_an_older_snapshot(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(INFO)
        server = servers.Server()
        first, late = (opened(server.url, capacity=1000) for _ in range(2))
        known, forgotten = fps(2500), fps(2500, 4000)  # with growth, before and after
        assert all(first.add(fingerprint) for fingerprint in known)
        server.client.save()
        assert all(first.add(fingerprint) for fingerprint in forgotten)
        assert not any(late.add(fingerprint) for fingerprint in [*known, *forgotten])
        server.kill()
        server.start()
        for each in (first, late):
            each.confirm()
        assert not any(first.add(fingerprint) for fingerprint in known)
        assert all(fingerprint not in late for fingerprint in forgotten)
        assert all(first.add(fingerprint) for fingerprint in forgotten[:100])
        assert not any(late.add(fingerprint) for fingerprint in forgotten[:100])
        assert not messages(caplog, WARNING)
        told = [each for each in messages(caplog, INFO) if "has been restarted" in each]
        assert len(told) == 2  # each of them once
        first.close()
        late.close()
        server.end()

    def test_a_single_evicted_key_is_mended_from_the_mirror(
        self, server: servers.Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        backend = opened(server.url)
        assert all(backend.add(fingerprint) for fingerprint in fps(1000))
        (generation,) = RedisStore(backend.server, "k").read().generations
        assert server.client.delete(f"k:{generation.id}:0") == 1
        assert backend.add(b"new")
        other = opened(server.url)
        assert not any(other.add(fingerprint) for fingerprint in [*fps(1000), b"new"])
        (warning,) = messages(caplog, WARNING)
        assert "Keys of" in warning
        other.close()
        backend.close()

    def test_a_promoted_replica(self) -> None:
        """Behind a Sentinel; what the master had not passed on is new again."""
        service = servers.Service()
        master, replica = service.servers
        backend = opened(service.url, sentinel="mymaster")
        assert all(backend.add(fingerprint) for fingerprint in fps(100))
        sent = master.client.info("replication")["master_repl_offset"]
        servers.wait_for(
            lambda: replica.client.info("replication")["slave_repl_offset"] >= sent,
            lambda: "the replica is behind",
        )
        replica.client.execute_command("REPLICAOF", "NO", "ONE")
        assert all(backend.add(fingerprint) for fingerprint in fps(100, 200))
        master.kill()
        service.watch(replica.port)
        backend.confirm()
        assert all(fingerprint not in backend for fingerprint in fps(100, 200))
        assert all(fingerprint in backend for fingerprint in fps(100))
        backend.close()
        service.end()

    def test_a_node_of_a_cluster_that_is_back_empty(self) -> None:
        """Its keys are lost; what the mirror has of those of the other nodes is asked anew."""
        cluster = servers.Cluster()
        backend = opened(cluster.url, cluster=True, capacity=3_000_000)  # 21 keys
        assert all(backend.add(fingerprint) for fingerprint in fps(1000))
        node = cluster.nodes[2]
        assert node.client.dbsize()
        voided = backend.voided
        node.kill()
        node.start()
        servers.wait_for(
            lambda: node.client.cluster("INFO")["cluster_state"] == "ok", lambda: "not ready"
        )
        assert all(backend.add(fingerprint) for fingerprint in fps(1000, 1100))
        assert backend.voided > voided
        new = sum(backend.add(fingerprint) for fingerprint in fps(1000))
        assert 20 < new < 980
        backend.close()
        cluster.end()

    def test_a_promoted_replica_in_a_cluster(self) -> None:
        """The connection to it may be older than its promotion."""
        cluster = servers.Cluster()
        master = cluster.nodes[1]
        options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
        # It takes over when it is told to, and not because its master was slow to answer.
        replica = servers.Server("valkey", *options, "--cluster-replica-no-failover", "yes")
        cluster.nodes.append(replica)
        me = replica.client.execute_command
        me("CLUSTER MEET", "127.0.0.1", master.port, master.cluster_bus_port)
        known = str(master.client.cluster("MYID"), "ascii")
        servers.wait_for(lambda: known in str(me("CLUSTER NODES")), lambda: "it is not met")
        me("CLUSTER REPLICATE", known)
        servers.wait_for(
            lambda: replica.client.info("replication").get("master_link_status") == "up",
            lambda: "it is not in step",
        )
        # The first node to be asked, so that there is a connection to it.
        backend = opened(replica.url, cluster=True, capacity=3_000_000)
        assert all(backend.add(fingerprint) for fingerprint in fps(1000))
        voided = backend.voided
        assert master.client.wait(1, 30_000) == 1
        master.kill()
        me("CLUSTER FAILOVER", "TAKEOVER")
        servers.wait_for(
            lambda: replica.client.cluster("INFO")["cluster_state"] == "ok", lambda: "not ready"
        )
        assert all(backend.add(fingerprint) for fingerprint in fps(1000, 1100))
        assert backend.voided > voided
        assert not any(backend.add(fingerprint) for fingerprint in fps(1000))
        backend.close()
        cluster.end()


class TestQueueOfOnesOwn:
    def test_what_the_mirror_knows_is_written_back(self, server: servers.Server) -> None:
        backend = opened(server.url, queue_is_shared=False)
        assert all(backend.add(fingerprint) for fingerprint in fps(1000))
        restart_empty(server)
        assert not any(backend.add(fingerprint) for fingerprint in fps(1000))
        backend.close()


class TestUnconfirmed:
    def test_what_is_unconfirmed(self, server: servers.Server) -> None:
        backend = opened(server.url, trust_secs=3600)
        assert all(backend.add(fingerprint) for fingerprint in fps(100))
        assert backend.unconfirmed == 0
        assert not any(backend.add(fingerprint) for fingerprint in fps(50))
        assert backend.unconfirmed == 50
        backend.confirm()
        assert (backend.unconfirmed, backend.voided) == (0, 0)
        assert not any(fingerprint not in backend for fingerprint in fps(50))
        assert backend.unconfirmed == 50
        assert backend.add(b"new")
        assert backend.unconfirmed == 0
        assert not any(backend.add(fingerprint) for fingerprint in fps(50))
        flush(server)
        backend.confirm()
        assert (backend.unconfirmed, backend.voided) == (0, 1)
        assert fps(1)[0] not in backend
        backend.close()

    def test_there_are_never_many(self, server: servers.Server) -> None:
        backend = opened(server.url, trust_secs=3600)
        assert all(backend.add(fingerprint) for fingerprint in fps(100))
        for _ in range(15):
            assert not any(backend.add(fingerprint) for fingerprint in fps(100))
            assert backend.unconfirmed <= 1000
        restart_empty(server)
        answers = [backend.add(fingerprint) for _ in range(12) for fingerprint in fps(100)]
        assert any(answers[:1001])
        backend.close()
