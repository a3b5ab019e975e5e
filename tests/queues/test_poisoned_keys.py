"""A shared queue with a key that somebody else has written: harmless, or refused in one line."""

import pytest

from scrapy_bloom.exceptions import BloomError, RefusedError
from scrapy_bloom.queues.redis_store import RedisStore
from scrapy_bloom.queues.store import Batch, State
from scrapy_bloom.redis.layout import KEYS
from tests.support.request_queues import InRedis, fail, page, push, taken

MEMBERS = [b"", b"x", b"x" * 8, b"\xff" * 40]
OTHERS = {"text": ("SET", "text"), "list": ("RPUSH", "a"), "set": ("SADD", "a")}
SETS = [name for name in KEYS if name not in ("filter", "rows", "runs", "workers")]
CASES = [
    *[(name, member) for name in SETS for member in MEMBERS],
    *[(name, kind) for name in KEYS if name != "filter" for kind in OTHERS],
    *[("rows", member) for member in (*MEMBERS, b"\x91\x01", b"\x9e" + b"\xc0" * 14)],
    *[("workers", field) for field in (b"", b"x" * 16, b"x" * 16 + b":number")],
]


@pytest.fixture
def store(shared: InRedis) -> RedisStore:
    store = shared.open()
    fail(store, page("failed"))
    for name in "abc":
        push(store, name)
    taken(store)
    return store


def poison(shared: InRedis, name: str, what: bytes | str) -> None:
    key = shared.keys[name]
    if isinstance(what, str):
        command, value = OTHERS[what]
        shared.server.send("UNLINK", key)
        shared.server.send(command, key, value)
    elif name == "rows":
        for id_ in shared.server.send("HKEYS", key):
            shared.server.send("HSET", key, id_, what)
    elif name == "workers":
        shared.server.send("HSET", key, what, "no number")
    else:
        shared.server.send("ZADD", key, 0, what)


@pytest.mark.parametrize(("name", "what"), CASES)
def test_a_poisoned_key(store: RedisStore, shared: InRedis, name: str, what: bytes | str) -> None:
    poison(shared, name, what)
    shared.server.send("HDEL", shared.key, "look")  # so that leases are checked
    steps = [
        lambda: store.apply(Batch([page("new")], want=5, stands_still=True)),
        lambda: store.apply(Batch(want=5, stands_still=True, is_over=True)),
        shared.queue().counts,
        lambda: shared.make().open(store._joining),
        *[lambda state=state: list(shared.queue().requests(state)) for state in State],
        shared.queue().slots,
        shared.state,
        store.close,
    ]
    for step in steps:
        try:
            step()
        except BloomError as error:
            assert "\n" not in str(error)
            assert not any(word in str(error) for word in ("user_script", "attempt to", "nil"))
            assert shared.key in str(error) or "start" in str(error), error


@pytest.mark.parametrize("name", ["rows", "pending", "workers"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_value_of_another_program_where_a_filter_would_be(
    shared: InRedis, name: str, kind: str
) -> None:
    poison(shared, name, kind)
    before = shared.server.send("DUMP", shared.keys[name])
    with pytest.raises(RefusedError, match="has a value of another program, which was left"):
        shared.open()
    assert shared.server.send("DUMP", shared.keys[name]) == before
