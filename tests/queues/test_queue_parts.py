"""The parts of a queue: members of sorted sets, pickles; and queues of other schedulers."""

import os
import struct
import threading
from pathlib import Path

import pytest

from scrapy_bloom import StorageError
from scrapy_bloom.queues.redis_store import Member, member_start, slot_name
from scrapy_bloom.queues.serialized import deserialized, serialized
from scrapy_bloom.queues.sqlite_queue import check_no_disk_queue, has_pending
from scrapy_bloom.queues.store import Entered
from tests.support.request_queues import begun, name_of, push, take

WAIT = 60.0  # seconds that any single wait may take


def member(
    slot: str, priority: int, rank: int, position: int, tries: int, deaths: int, data: bytes
) -> bytes:
    """A request as the script writes it."""
    order = member_start(Entered(data, slot=slot, priority=priority, rank=rank))
    return order + struct.pack(">QBB", position, tries, deaths) + b"w" * 16 * deaths + data


class TestMembers:
    @pytest.mark.parametrize(
        "parts",
        [
            ("", 0, 0, 0, 0, 0, b""),
            ("a.example", 5, -128, 1, 4, 3, b"\0data\xff"),
            ("\ud800é", -(2**63) + 1, 127, 2**53, 0, 255, b"x"),
            ("b", 2**63 - 1, 1, 2**53 - 1, 5, 1, b"y"),
        ],
    )
    def test_they_are_read_as_they_were_written(
        self, parts: tuple[str, int, int, int, int, int, bytes]
    ) -> None:
        assert Member.parsed(member(*parts)) == parts

    def test_the_format(self) -> None:
        """Servers hold it: it never changes."""
        numbers = bytes.fromhex("7ffffffffffffffd 83 0000000000000004 05 01")
        assert member("a\0b", 2, 3, 4, 5, 1, b"data") == (b"a\1b\0" + numbers + b"w" * 16 + b"data")
        assert slot_name("\ud800") == b"\xed\xa0\x80"

    def test_their_order_is_that_of_the_queue(self) -> None:
        written = [
            member("a", priority, rank, position, 0, 0, b"")
            for priority in (2**70, 1, 0, -1, -(2**70))
            for rank in (-128, -1, 0, 127)
            for position in (0, 1, 255, 256, 2**53)
        ]
        assert written == sorted(written)
        assert member("a", 2**70, 0, 1, 0, 0, b"") == member("a", 2**63 - 1, 0, 1, 0, 0, b"")
        assert member("a", -(2**70), 0, 1, 0, 0, b"") == member("a", -(2**63) + 1, 0, 1, 0, 0, b"")


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
    assert serialized(request)[:2] == b"\x80\x04"  # readable by every Python that Scrapy runs on
