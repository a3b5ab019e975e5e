"""What a queue is made of: members, the last pushes, leases; and queues that stand in its way."""

import os
import threading
from pathlib import Path

import pytest

from clock import Clock
from request_queues import begun, name_of, push, take
from scrapy_bloom import StorageError
from scrapy_bloom.exceptions import OutageError
from scrapy_bloom.queues import lease, recent
from scrapy_bloom.queues.batch import deserialized, serialized
from scrapy_bloom.queues.conflicts import check_no_database, check_no_disk_queue, has_waiting
from scrapy_bloom.queues.lease import Lease
from scrapy_bloom.queues.members import (
    Member,
    keys_of_queue,
    parsed,
    parsed_leased,
    prefix,
    slot_name,
)
from scrapy_bloom.queues.recent import Push, RecentPushes
from scrapy_bloom.queues.shared_state import QueueState, Worker

WAIT = 60.0  # seconds that any single wait may take


class TestMembers:
    @pytest.mark.parametrize(
        "member",
        [
            Member("", 0, 0, 0, b""),
            Member("a.example", 5, -128, 1, b"\0data\xff"),
            Member("\ud800é", -(2**63) + 1, 127, 2**53, b"x"),
            Member("b", 2**63 - 1, 1, 2**64 - 1, b"y"),
        ],
    )
    def test_they_are_read_as_they_were_written(self, member: Member) -> None:
        assert parsed(member.packed) == member
        assert parsed_leased(b"w" * 16 + b"i" * 8 + member.packed) == (b"w" * 16, b"i" * 8, member)

    def test_the_format(self) -> None:
        """Servers hold it: it never changes."""
        packed_member = Member("a\0b", 2, 3, 4, b"data").packed
        assert packed_member == b"a\1b\0" + bytes.fromhex(
            "7ffffffffffffffd 83 0000000000000004"
        ) + (b"data")
        assert prefix("a", 0, 0) == b"a\0" + bytes.fromhex("7fffffffffffffff 80")
        assert slot_name("\ud800") == b"\xed\xa0\x80"

    def test_their_order_is_that_of_the_queue(self) -> None:
        ordered = [
            Member("a", priority, rank, position, b"")
            for priority in (2**70, 1, 0, -1, -(2**70))
            for rank in (-128, -1, 0, 127)
            for position in (0, 1, 255, 256, 2**53)
        ]
        written = [each.packed for each in ordered]
        assert written == sorted(written)
        assert prefix("a", 2**70, 0) == prefix("a", 2**63 - 1, 0)
        assert prefix("a", -(2**70), 0) == prefix("a", -(2**63) + 1, 0)

    def test_keys(self) -> None:
        assert list(keys_of_queue("shop")) == [
            "{shop}:queue:pending",
            "{shop}:queue:leased",
            "{shop}:queue:workers",
            "{shop}:queue:state",
            "shop",
        ]


class TestRecentPushes:
    @staticmethod
    def of(data: bytes) -> Push:
        return Push(b"prefix", 1, data)

    def test_those_after_a_number_are_pushed_again(self) -> None:
        pushes = RecentPushes()
        for number in range(5):
            pushes.add(number, self.of(b"%d" % number))
        assert [each.data for each in pushes.since(2)] == [b"3", b"4"]
        assert all(each.is_again for each in pushes.since(-1))
        assert len(pushes.since(-1)) == 5
        pushes.drop_last()
        assert [each.data for each in pushes.since(2)] == [b"3"]
        for _ in range(6):
            pushes.drop_last()  # also when there is none
        assert not pushes.since(-1)

    def test_as_many_as_may_be(self) -> None:
        pushes = RecentPushes()
        for number in range(1001):
            pushes.add(number, self.of(b"x"))
            assert len(pushes.since(-1)) == min(number + 1, 1000)
        assert len(pushes.since(0)) == 1000

    def test_as_many_bytes_as_may_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert recent._MOST_BYTES == 8 << 20
        monkeypatch.setattr(recent, "_MOST_BYTES", 10)
        pushes = RecentPushes()
        for number, length in enumerate((4, 6)):
            pushes.add(number, self.of(bytes(length)))
        assert len(pushes.since(-1)) == 2
        pushes.drop_last()
        pushes.add(2, self.of(bytes(6)))
        assert len(pushes.since(-1)) == 2
        pushes.add(3, self.of(b"1"))
        assert [len(each.data) for each in pushes.since(-1)] == [6, 1]
        pushes.add(4, self.of(bytes(3)))
        assert len(pushes.since(-1)) == 3
        pushes.add(5, self.of(bytes(11)))  # more than all
        assert not pushes.since(-1)


class TestLease:
    def test_it_is_renewed_four_times_while_it_lasts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        waits: list[float | None] = []
        wait = threading.Event.wait

        def noted(event: threading.Event, timeout: float | None = None) -> bool:
            if threading.current_thread().name == "scrapy_bloom lease":
                waits.append(timeout)
                return wait(event, 0.001)
            return wait(event, timeout)

        monkeypatch.setattr(threading.Event, "wait", noted)
        renewed = threading.Event()
        held = Lease(lambda: renewed.set() or True, 100.0)
        assert renewed.wait(WAIT)
        held.end()
        assert set(waits) == {25.0}
        assert held._thread.daemon  # else a crawl that dies would go on
        assert not held._thread.is_alive()

    def test_it_may_be_over_when_nobody_has_renewed_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(1000.0)
        monkeypatch.setattr(lease.time, "monotonic", clock)
        held = Lease(lambda: True, 1000.0)
        try:
            assert held.secs == 1000.0
            clock.now += 999.9
            assert not held.may_be_over()
            clock.now += 0.1
            assert held.may_be_over()
            held.renewed()
            assert not held.may_be_over()
        finally:
            held.end()

    @pytest.mark.parametrize("answer", [True, False, OutageError("away")])
    def test_only_an_answer_that_there_is_one_renews_it(
        self, answer: bool | Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = Clock(1000.0)
        times = 0
        twice = threading.Event()

        def renew() -> bool:
            nonlocal times
            times += 1
            if times == 2:
                twice.set()
            if times == 1:
                clock.now += 600  # the answer takes its time: it is old by then
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(lease.time, "monotonic", clock)
        held = Lease(renew, 0.01)
        assert twice.wait(WAIT)  # also after an outage
        held.end()
        held.secs = 500.0
        assert held.may_be_over() is (answer is not True)
        clock.now += 500
        assert held.may_be_over()


class TestConflicts:
    def test_no_queue_at_all(self, tmp_path: Path) -> None:
        check_no_database(tmp_path)
        check_no_disk_queue(tmp_path)
        assert not has_waiting(tmp_path)

    def test_requests_wait_in_the_database(self, tmp_path: Path) -> None:
        queue = begun(tmp_path / "requests.sqlite", by_slot=False)
        check_no_database(tmp_path)
        assert not has_waiting(tmp_path)
        push(queue, "a")
        assert has_waiting(tmp_path)
        for name in "bc":
            push(queue, name)
        assert take(queue)
        with pytest.raises(StorageError, match="3 requests .* not know of them"):
            check_no_database(tmp_path)
        for in_redis, said in ((False, "3 requests .* not know of them"), (True, "BLOOM_QUEUE is")):
            with pytest.raises(StorageError, match=said):
                check_no_database(tmp_path, in_redis=in_redis)
        assert has_waiting(tmp_path)
        check_no_disk_queue(tmp_path)
        queue.close()

    def test_requests_wait_in_scrapys_queue(self, tmp_path: Path) -> None:
        queue = tmp_path / "requests.queue"
        queue.mkdir()
        (queue / "active.json").write_text("[]")
        check_no_disk_queue(tmp_path)
        assert not has_waiting(tmp_path)
        (queue / "p0").write_bytes(b"request")
        with pytest.raises(StorageError, match="a job of Scrapy's own scheduler"):
            check_no_disk_queue(tmp_path)
        assert has_waiting(tmp_path)
        check_no_database(tmp_path)

    def test_scrapys_queue_was_broken_by_a_kill(self, tmp_path: Path) -> None:
        queue = tmp_path / "requests.queue"
        queue.mkdir()
        state = queue / "active.json"
        state.write_text("[]")
        os.utime(state, (1, 1))
        with pytest.raises(StorageError, match="a job of Scrapy's own scheduler"):
            check_no_disk_queue(tmp_path)
        assert not has_waiting(tmp_path)

    def test_a_directory_that_cannot_be_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "requests.queue").symlink_to("requests.queue")  # round and round

        def refuses(path: Path, **_: object) -> bool:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "exists", refuses)
        with pytest.raises(StorageError, match=f"{tmp_path} cannot be read: Permission denied;"):
            check_no_disk_queue(tmp_path)


def test_the_slot_with_the_fewest_downloads_is_next(tmp_path: Path) -> None:
    queue = begun(tmp_path / "requests.sqlite", by_slot=True)
    for slot in "abc" * 3:
        push(queue, slot, slot=slot)
    for counts, slot in (
        ({"a": 1, "b": 1, "c": 0}, "c"),
        ({"a": 1, "b": 0, "c": 0}, "b"),  # after c comes a, which has one
        ({"a": 2, "b": 2, "c": 1}, "c"),
        ({"a": 2, "b": 1, "c": 1}, "b"),
        ({"a": 3, "b": 3, "c": 3}, "c"),
    ):
        assert name_of(take(queue, counts.__getitem__)) == slot
    queue.close()


def test_the_first_slot_is_that_of_the_first_name(tmp_path: Path) -> None:
    queue = begun(tmp_path / "requests.sqlite", by_slot=True)
    for slot in ("b", "A"):
        push(queue, slot, slot=slot)
    assert name_of(take(queue)) == "A"
    queue.close()


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


def test_what_all_workers_have_is_waiting() -> None:
    workers = [Worker("a", "host:1", is_alive=True, in_flight=2), Worker("b", "?", False, 3)]
    state = QueueState(
        pending=10, done=4, is_started=True, ended_at=0.0, workers=workers, set_aside=100
    )
    assert (state.in_flight, state.waiting) == (5, 115)
