"""The parts of a queue: rows in Redis, pickles; and queues of other schedulers."""

import os
import struct
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.queues.redis_store import copied_row, packed_row, parsed_row
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.sqlite_queue import check_no_disk_queue, has_pending
from scrapy_bloom.queues.store import Row, State, packed_first, packed_order
from tests.support.request_queues import InRedis, begun, enter, name_of, page, push, take

WAIT = 60.0  # seconds that any single wait may take


FULL = Row(
    b"data\0\xff",
    State.FAILED,
    "a\ud800",
    5,
    -128,
    newest_first=False,
    position=2**52,
    first=packed_first(packed_order("b", 1, 2), b"first", newest_first=True),
    page=b"page",
    hops=(b"one", b"\0"),
    is_filtered=True,
    is_start=True,
    once=True,
    was_taken=True,
    tries=4,
    deaths=2,
    reason="503",
)


class TestRows:
    @pytest.mark.parametrize(
        "row",
        [
            Row(b"", position=1),
            FULL,
            replace(FULL, state=State.WAITING, waits_for=b"one", reason=""),
            replace(FULL, state=State.DEAD, page=None, hops=()),
        ],
    )
    def test_they_are_read_as_they_were_written(self, row: Row) -> None:
        packed = packed_row(row, b"w" * 16 * row.deaths)
        assert parsed_row(row.state, packed) == row

    @pytest.mark.parametrize("length", [0, 1, 13, 14, 17, 40, 100])
    def test_what_is_cut_off_is_refused(self, length: int) -> None:
        packed = packed_row(FULL, b"w" * 32)
        with pytest.raises((ValueError, struct.error)):
            parsed_row(State.FAILED, packed[:length])

    def test_a_script_and_a_copy_write_the_same(self, shared: InRedis) -> None:
        store = shared.open()
        enter(store, page("a", slot="x", priority=3, rank=1, once=True, newest_first=False))
        (row,) = shared.queue().requests(State.PENDING)
        id_, packed, places = copied_row(row, 1)
        assert shared.server.send("HKEYS", shared.keys["rows"]) == [id_]
        assert parsed_row(State.PENDING, packed) == replace(row, epoch=0)
        for name, member in places:
            assert shared.server.send("ZRANGE", shared.keys[name], 0, -1) == [member]


class TestConflicts:
    def test_scrapys_queue_was_broken_by_a_kill(self, tmp_path: Path) -> None:
        queue = tmp_path / "requests.queue"
        queue.mkdir()
        state = queue / "active.json"
        state.write_text("[]")
        os.utime(state, (1, 1))
        with pytest.raises(StorageError, match="a job of Scrapy's own scheduler"):
            check_no_disk_queue(tmp_path)
        assert not has_pending(tmp_path)

    def test_a_directory_that_cannot_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "requests.queue").symlink_to("requests.queue")  # round and round

        def refuses(path: Path, **_: object) -> bool:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "exists", refuses)
        with pytest.raises(StorageError, match=f"{tmp_path} cannot be read: Permission denied;"):
            check_no_disk_queue(tmp_path)


def test_a_database_is_used_in_another_place_than_it_was_opened_in(tmp_path: Path) -> None:
    """A shell opens it in one thread and uses it in another."""
    queue = begun(tmp_path / "requests.sqlite", by_slot=False)
    thread = threading.Thread(target=lambda: push(queue, "a"))
    thread.start()
    thread.join(WAIT)
    assert name_of(take(queue)) == "a"
    queue.close()


def test_a_request_is_read_as_it_was_written() -> None:
    request = {"url": "https://example.com/", "meta": {"depth": 1}}
    assert deserialized(serialized(request)) == request
    _, _, data = serialized(request).partition(b"\n")
    assert data[:2] == b"\x80\x04"  # readable by every Python that Scrapy runs on
