"""The database of a job: each batch is stored whole or not at all, whatever comes in between."""

import itertools
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.job.disk import log_and_index
from scrapy_bloom.queues import database as module
from scrapy_bloom.queues.database import JobDatabase
from scrapy_bloom.queues.store import Batch, Ended, Entered, State
from tests.support.batches import (
    BATCHES,
    begun,
    killed_at_operations,
    run_batches,
    snapshot,
    snapshots,
)
from tests.support.crawls import ROOT, run_script
from tests.support.local_filters import file_size_limit
from tests.support.request_queues import begun as opened
from tests.support.request_queues import enter, names, page, push, taken
from tests.support.stores import InFiles

PAGE = 4096
WAIT = 60.0  # seconds that any single wait may take


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.sqlite"


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")
def test_a_kill_at_any_operation_of_a_file(tmp_path: Path) -> None:
    """Also if somebody removes the write-ahead log afterwards: it may be older, and not torn."""
    (tmp_path / "whole").mkdir()
    expected = snapshots(tmp_path / "whole")
    left = killed_at_operations(tmp_path / "killed")
    assert len(left) > 5 * BATCHES
    seqs, refused = set(), 0
    for directory in left:
        path = directory / "requests.sqlite"
        without_log = tmp_path / "without" / directory.name
        shutil.copytree(directory, without_log)
        database = JobDatabase(path, by_slot=False)
        assert snapshot(path) in expected, directory
        database.begin()
        assert database.died == []
        seqs.add(database.seq)
        database.close()
        store = opened(path)
        push(store, "one more")
        assert taken(store)
        store.close()

        path = without_log / path.name
        if (log := log_and_index(path)[0]).exists():
            log.unlink() if len(seqs) % 2 else os.truncate(log, 0)
        try:
            database = JobDatabase(path, by_slot=False)
        except StorageError as error:
            refused += 1
            assert "\n" not in str(error)
        else:
            assert snapshot(path) in expected, without_log
            database.close()
    assert seqs == set(range(BATCHES + 1))
    assert 0 < refused < len(left) // 2


def test_a_part_that_is_older_than_the_rest(path: Path, tmp_path: Path) -> None:
    """As by a kill while SQLite writes its log into the file, if the log is removed then."""
    database = begun(path)
    files, expected = [], []
    for _ in itertools.islice(run_batches(database), 3 * BATCHES):
        database.checkpointed(0)
        files.append(path.read_bytes())
        expected.append(snapshot(path))
    database.close()
    torn = tmp_path / "torn" / path.name
    torn.parent.mkdir()
    reasons = set()
    for number, old in enumerate(files[:-3:2]):
        new = files[2 * number + 1 + number % 3]
        for end in range(0, len(new), PAGE):
            torn.write_bytes(new[:end] + old[end:])
            what = f"{end // PAGE} pages of another batch than number {number}"
            try:
                database = JobDatabase(torn, by_slot=False)
            except StorageError as error:
                assert "\n" not in str(error), what
                reasons.add(str(error))
                continue
            assert snapshot(torn) in expected, what
            database.close()
    assert any("a part of it is older than the rest" in reason for reason in reasons)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_kills_at_random_instants_while_a_thread_checkpoints(kills: int, tmp_path: Path) -> None:
    whole = begun(tmp_path / "whole.sqlite")
    steps = run_batches(whole)
    expected = [snapshot(tmp_path / "whole.sqlite")]
    script = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from tests.support.batches import *\n"
        "database = begun(Path(sys.argv[1]))\n"
        "def checkpoint():\n"
        "    while True:\n"
        "        seq = database.seq\n"
        "        database.sync()\n"
        "        database.checkpointed(seq)\n"
        "threading.Thread(target=checkpoint, daemon=True).start()\n"
        "for number, _ in enumerate(run_batches(database)):\n"
        "    if number == 10:\n"
        "        print('ready', flush=True)\n"
    )
    for kill in range(kills):
        path = tmp_path / f"{kill}.sqlite"
        process = subprocess.Popen(
            [sys.executable, "-c", script, path],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        )
        assert process.stdout
        with process, process.stdout as output:
            assert output.readline() == b"ready\n"
            time.sleep(random.random() / 2)
            process.send_signal(signal.SIGKILL)
        assert process.returncode == -signal.SIGKILL
        database = JobDatabase(path, by_slot=False)
        while len(expected) <= database.seq:
            next(steps)
            expected.append(snapshot(tmp_path / "whole.sqlite"))
        counts, requests, ops = snapshot(path)
        of_whole, requests_of_whole, ops_of_whole = expected[database.seq]
        assert (counts._replace(applied=0), requests) == (of_whole, requests_of_whole)
        assert ops == tuple(row for row in ops_of_whole if row[0] > counts.applied)
        database.begin()
        database.close()
    whole.close()


def stored(database: JobDatabase, number: int, size: int = 1000) -> None:
    """Store so many requests as a batch."""
    with database.transaction(is_batch=True) as changes:
        changes.insert([changes.new_row(Entered(bytes(size))) for _ in range(number)])


class TestFullDisk:
    def test_a_batch_is_rolled_back(self, tmp_path: Path) -> None:
        """Its requests enter neither the queue nor the filter; the same batch can be repeated."""
        place = InFiles(tmp_path)
        store = place.open()
        enter(store, page("a"), page("b"))
        before, figures = snapshot(place.path), store.counts()
        large = [page(str(number))._replace(data=bytes(10_000)) for number in range(50)]
        batch = Batch(large, ended=[Ended(taken(store).id)], want=1)
        before, counts = snapshot(place.path), store.counts()
        assert counts != figures
        with file_size_limit(log_and_index(place.path)[0].stat().st_size + 50_000):
            for _ in range(2):
                with pytest.raises(StorageError, match="cannot be written or read"):
                    store.apply(batch)
                assert snapshot(place.path) == before
                assert store.counts() == counts
                assert not any(store.knows(each.fingerprint or b"") for each in large)
        reply = store.apply(batch)
        assert reply.queued == [True] * 50
        assert (reply.pending, reply.left, reply.counters) == (50, 51, (52, 1))
        assert all(store.knows(each.fingerprint or b"") for each in large)
        place.die()
        assert enter(place.open(), *large) == [False] * 50
        assert place.store.counts()[State.PENDING] == 51
        place.close()

    def test_a_batch_that_is_stored_does_not_fail(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though its log cannot be truncated, since the file itself cannot grow."""
        database = begun(path)
        stored(database, 100)
        database.checkpointed(0)
        size = path.stat().st_size
        assert size > 100_000
        monkeypatch.setattr(module, "_LOG_BYTES", 1)
        with file_size_limit(size):
            for _ in range(2):
                stored(database, 10)
        assert (database.seq, database.left) == (3, 120)
        assert path.stat().st_size == size
        is_truncated(database, path)
        assert path.stat().st_size > size
        database.close()

    def test_a_close_harms_nothing(self, path: Path) -> None:
        store = opened(path)
        for number in range(200):
            push(store, str(number), slot="x" * 500, newest_first=False)
        assert names(store, 1) == ["0"]
        with file_size_limit(path.stat().st_size):
            store.close()
        store = opened(path)
        assert store.pending == 200
        assert names(store, 1) == ["0"]
        store.close()


def is_truncated(database: JobDatabase, path: Path) -> None:
    """Store batches until the log is empty, or fail."""
    for _ in range(1000):
        stored(database, 10)
        thread = database._truncating
        if thread is not None:
            thread.join(WAIT)
        if not log_and_index(path)[0].stat().st_size:
            return
    raise AssertionError("the log is not truncated")


LONG_LOG = """
    import os, sys
    from pathlib import Path
    from scrapy_bloom.queues import database as module
    from scrapy_bloom.queues.store import Batch, Entered
    from tests.support.request_queues import begun

    module._LOG_BYTES = 1 << 20
    store = begun(Path(sys.argv[1]) / "requests.sqlite")
    data = os.urandom(60_000)
    marks = open(Path(sys.argv[1]) / "marks", "wb")
    os.ftruncate(marks.fileno(), 1)
    for _ in range(2):
        for _ in range(30):
            store.apply(Batch([Entered(data)]))
        store._database._truncating.join()
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
        for before, call in itertools.pairwise(["", *of_main]):
            if call.startswith(syncs):
                assert header.match(before), (before, call)
                assert "-wal>" in call
            else:
                assert call.startswith("pwrite64(")

    def test_it_is_truncated_while_a_thread_checkpoints(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SQLite itself begins the log anew only if nobody writes during a checkpoint."""
        assert module._LOG_BYTES == 64 << 20
        monkeypatch.setattr(module, "_LOG_BYTES", 1 << 20)
        database = begun(path)
        is_over = threading.Event()

        def checkpoint() -> None:
            while not is_over.is_set():
                seq = database.seq
                database.sync()
                database.checkpointed(seq)

        thread = threading.Thread(target=checkpoint)
        thread.start()
        batches = truncations = size = 0
        end = time.monotonic() + WAIT
        try:
            while truncations < 3 and time.monotonic() < end:
                batches += 1
                stored(database, 100)
                size, before = log_and_index(path)[0].stat().st_size, size
                truncations += size < before
        finally:
            is_over.set()
            thread.join(WAIT)
        assert truncations == 3
        assert not thread.is_alive()
        assert database.seq == database.left // 100 == batches
        database.close()
        database = JobDatabase(path, by_slot=False)
        assert not database.was_killed
        assert database.left == 100 * batches
        database.close()

    def test_somebody_who_reads_does_not_block_it(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "_LOG_BYTES", 1 << 20)
        monkeypatch.setattr(module, "_PATIENCE_MS", 2**31 - 1)  # it would wait for ever
        database = begun(path)
        stored(database, 1)
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM requests").fetchone() == (1,)
        for _ in range(30):
            stored(database, 100)
        assert reader.execute("SELECT count(*) FROM requests").fetchone() == (1,)
        reader.close()
        is_truncated(database, path)
        database.close()


def test_a_file_that_was_removed_is_not_made_again(path: Path) -> None:
    """An empty one would look like a queue that somebody emptied."""
    database = begun(path)
    stored(database, 1)
    path.unlink()
    database.checkpointed(1)
    assert not path.exists()
    database.close()
