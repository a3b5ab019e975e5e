"""The file of a job: each batch is stored whole or not at all, whatever comes in between."""

import os
import re
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job import file as module
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.queues.sqlite_store import SQLiteStore
from scrapy_bloom.queues.store import Batch, Ended, Entered, State
from tests.support.crawls import run_script
from tests.support.local_filters import file_size_limit
from tests.support.request_queues import begun as opened
from tests.support.request_queues import enter, page, taken
from tests.support.stores import InFiles

FILE = "bloom.sqlite"
WAIT = 60.0  # seconds that any single wait may take
MEGABYTE = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE


@pytest.fixture
def place() -> Iterator[InFiles]:
    place = InFiles()
    yield place
    place.end()


def snapshot(path: Path) -> list[Any]:
    """Return the figures and the rows of a job."""
    with closing(sqlite3.connect(path)) as db:
        figures = db.execute("SELECT seq, num_rows, done, position FROM job").fetchone()
        return [figures, *db.execute("SELECT * FROM requests ORDER BY id")]


def stored(store: SQLiteStore, number: int, size: int = 1000) -> None:
    """Store so many requests as a batch."""
    enter(store, *[Entered(bytes(size))] * number)


def truncations(store: SQLiteStore, number: int) -> int:
    """Store batches until the log was truncated so often, or fail; return how many batches."""
    log, _ = log_and_index(Path(store.name))
    batches, size, end = 0, log.stat().st_size, time.monotonic() + WAIT
    while number:
        assert time.monotonic() < end, "the log is not truncated"
        stored(store, 1, MEGABYTE)
        batches += 1
        size, before = log.stat().st_size, size
        number -= size < before
    return batches


class TestFullDisk:
    def test_a_batch_is_rolled_back(self, tmp_path: Path) -> None:
        """Its requests enter neither the queue nor the filter; the same batch can be repeated."""
        place = InFiles(tmp_path)
        store = place.open()
        enter(store, page("a"), page("b"))
        before, figures = snapshot(place.path), place.queue().status().counts
        large = [page(str(number))._replace(data=bytes(10_000)) for number in range(50)]
        batch = Batch(large, ended=[Ended(taken(store).id)], want=1)
        before, counts = snapshot(place.path), place.queue().status().counts
        assert counts != figures
        with file_size_limit(log_and_index(place.path)[0].stat().st_size + 50_000):
            for _ in range(2):
                with pytest.raises(StorageError, match="cannot be written or read"):
                    store.apply(batch)
                assert snapshot(place.path) == before
                assert place.queue().status().counts == counts
                assert not any(store.knows(entry.fingerprint or b"") for entry in large)
        reply = store.apply(batch)
        assert reply.queued == [True] * 50
        assert (reply.pending, reply.unfinished, reply.counters) == (50, 51, (52, 1))
        assert all(store.knows(entry.fingerprint or b"") for entry in large)
        place.die()
        assert enter(place.open(), *large) == [False] * 50
        assert place.queue().status().counts[State.PENDING] == 51
        place.close()

    def test_a_log_that_cannot_be_moved_into_the_file_ends_the_crawl(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was stored is complete."""
        store = opened(path)
        stored(store, 100)
        file = store._database.file
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        monkeypatch.setattr(module, "_LOG_BYTES", 1)
        with file_size_limit(path.stat().st_size):
            stored(store, 10)
            assert file._syncer
            file._syncer.join(WAIT)
            with pytest.raises(StorageError, match="nothing is lost: free some space"):
                stored(store, 10)
        store.close()
        store = opened(path)
        assert store._database.file.was_killed
        assert store.pending == 110
        store.close()


LONG_LOG = """
    import os, sys, time
    from pathlib import Path
    from scrapy_bloom.job import file as module
    from scrapy_bloom.queues.store import Batch, Entered
    from tests.support.request_queues import begun

    module._LOG_BYTES = 1 << 20
    store = begun(Path(sys.argv[1]) / "bloom.sqlite")
    marks = open(Path(sys.argv[1]) / "marks", "wb")
    os.ftruncate(marks.fileno(), 1)
    data, size, log = os.urandom(60_000), 0, Path(f"{store.name}-wal")
    for _ in range(2):
        before = -1
        while size >= before:
            store.apply(Batch([Entered(data)]))
            size, before = log.stat().st_size, size
            time.sleep(0.005)  # as the event loop waits for answers
    os.ftruncate(marks.fileno(), 2)
    store.close()
    print(os.getpid())
"""


class TestLengthOfTheLog:
    @pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")
    def test_a_thread_syncs_it(self, tmp_path: Path) -> None:
        """The event loop, which stores the batches, waits for no disk meanwhile."""
        trace = tmp_path / "trace"
        calls = "trace=fsync,fdatasync,ftruncate,pwrite64"
        under = ["strace", "-f", "-y", "-qq", "-s", "0", "-e", calls, "-o", os.fspath(trace)]
        ran = run_script(LONG_LOG, tmp_path, cwd=tmp_path, prefix=under)
        assert ran.returncode == 0, ran.stderr
        main = ran.stdout.strip()
        # A call during which another thread makes one has a second line.
        lines = [line for line in trace.read_text().splitlines() if " resumed>" not in line]
        first, last = (i for i, line in enumerate(lines) if "/marks>" in line)
        during = [line.split(None, 1) for line in lines[first + 1 : last]]
        of_main = [call for thread, call in during if thread == main]
        of_others = [call for thread, call in during if thread != main]
        syncs = ("fsync(", "fdatasync(")  # not "sync", because the name of the directory has it
        assert any(call.startswith("ftruncate(") and "-wal>" in call for call in of_others)
        assert any(call.startswith(syncs) for call in of_others)
        # Only after it has written the header of an empty log does SQLite sync it at once, which
        # takes no time worth mentioning. How often the log becomes empty depends on the threads.
        header = re.compile(r"pwrite64\(\d+<[^>]*-wal>, .*, 32, 0( <unfinished|\))")
        for before, call in pairwise(["", *of_main]):
            if call.startswith(syncs):
                assert header.match(before), (before, call)
                assert "-wal>" in call
            else:
                assert call.startswith("pwrite64(")

    def test_it_is_truncated_while_batches_are_stored(self, place: InFiles) -> None:
        """SQLite itself begins the log anew only if nobody writes during a checkpoint."""
        batches = truncations(place.open(), 2)
        assert batches > 64
        place.close()
        place.open()
        assert place.opened.killed == 0
        assert place.store.pending == batches
        place.close()

    def test_somebody_who_reads_does_not_block_it(self, place: InFiles) -> None:
        store = place.open()
        stored(store, 1)
        reader = sqlite3.connect(place.path, isolation_level=None)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM requests").fetchone() == (1,)
        for _ in range(80):
            stored(store, 1, MEGABYTE)
        assert reader.execute("SELECT count(*) FROM requests").fetchone() == (1,)
        reader.close()
        truncations(store, 1)
        place.close()


def test_a_file_that_was_removed_is_not_made_again(path: Path) -> None:
    """An empty one would look like a queue that somebody emptied."""
    store = opened(path)
    stored(store, 1)
    path.unlink()
    for write in (store._database.file._sync_all, store.close):
        with pytest.raises(StorageError, match="was removed"):
            write()
        assert not path.exists()
