"""Makers of generations that stood still: once others took them for dead, nothing is published."""

import pytest

from scrapy_bloom.copying.drafts import Draft
from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.generations.policy import ANY_ORIGIN, Policy
from scrapy_bloom.redis.connection.server import RedisServer
from scrapy_bloom.redis.filter import SharedFilter
from scrapy_bloom.redis.reader import unjoined
from scrapy_bloom.redis.stored import RedisGeneration
from tests.support import servers

POLICY = Policy(expected=1000, error_rate=1e-3)


def crawler(server: servers.Server) -> SharedFilter:
    return SharedFilter(RedisServer(server.url), "k", POLICY, ANY_ORIGIN)


def generation(number: int = 1) -> RedisGeneration:
    return RedisGeneration.of(POLICY.first(), number, 1.0, open_until=0.0)


def grow_old(server: servers.Server, draft: RedisGeneration) -> None:
    """Make a draft as old as it is after a minute without a sign of life."""
    server.client.hset("k", f"draft:{draft.id}", f"[{draft.num_chunks}, 1]")


@pytest.fixture
def unremoved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives a draft up stands still, too, before it removes the keys."""
    monkeypatch.setattr(SharedFilter, "_remove_keys", lambda *_: None)
    monkeypatch.setattr(SharedFilter, "_drop_draft", lambda *_: None)


@pytest.mark.usefixtures("unremoved")
def test_a_copy_that_was_given_up_is_not_published(server: servers.Server) -> None:
    new = generation()
    copy = Draft(unjoined(RedisServer(server.url), "k"), [new])
    grow_old(server, new)
    crawler(server).join()
    # As if nothing had been made instead.
    server.client.hdel("k", "id")
    for step in (lambda: copy._note(begin=False), lambda: copy.publish({})):
        with pytest.raises(StorageError, match="this copy was removed"):
            step()
    assert not server.client.hexists("k", "id")


@pytest.mark.usefixtures("unremoved")
def test_a_generation_that_was_given_up_is_not_published(server: servers.Server) -> None:
    slow, other = crawler(server), crawler(server)
    slow.join()
    new = generation(2)
    assert slow.note_drafts([new], goes_on=False)
    grow_old(server, new)
    other.join()
    assert not slow.note_drafts([new], goes_on=True)
    assert not slow.note_drafts([new], goes_on=False)  # a copy of the first request, which is late
    slow.change(set_=new.fields, draft=new.id)
    assert len(slow.live) == 1


def test_one_that_nobody_gave_up_goes_on(server: servers.Server) -> None:
    slow = crawler(server)
    slow.join()
    new = generation(2)
    assert slow.note_drafts([new], goes_on=False)
    grow_old(server, new)
    assert slow.note_drafts([new], goes_on=True)
    slow.change(set_=new.fields, draft=new.id)
    assert len(slow.live) == 2


def test_what_others_make_is_left_alone(server: servers.Server) -> None:
    new = generation()
    Draft(unjoined(RedisServer(server.url), "k"), [new])
    assert not crawler(server)._make_blocks(generation())
    with pytest.raises(StorageError, match="another crawl or copy is making the filter"):
        Draft(unjoined(RedisServer(server.url), "k"), [generation()])
