"""A request is done when it has ended, and all requests in memory that it led to are done."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from scrapy import Request
from scrapy.http import Response
from scrapy.settings import Settings
from scrapy.signalmanager import SignalManager
from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from scrapy_bloom.crawl.scheduler.in_flight import Flight, InFlight

URL = "https://example.com/"


class Engine:
    """The parts of Scrapy's engine that are hooked: their Deferreds end when a test says so."""

    def __init__(self) -> None:
        self.fetched: dict[int, Deferred] = {}
        self.scraped: dict[int, Deferred] = {}
        self.downloader = SimpleNamespace(fetch=lambda _: self._new(self.fetched))
        self.scraper = SimpleNamespace(
            enqueue_scrape=lambda *_: self._new(self.scraped),
            call_spider_async=None,
            handle_spider_error=None,
        )
        self.number = 0

    def _new(self, kept: dict[int, Deferred]) -> Deferred:
        self.last = kept[self.number] = Deferred()
        return self.last


def tracked(engine: Engine) -> InFlight:
    crawler = SimpleNamespace(engine=engine, settings=Settings(), signals=SignalManager())
    return InFlight(crawler)


@dataclass(eq=False)
class Node:
    """A request of the model."""

    name: int
    request: Request
    children: list["Node"] = field(default_factory=list)
    state: str = "pending"  # then "downloading", "handled", "ended"; or "left"
    downloaded: Deferred | None = None
    handled: Deferred | None = None
    result: object = None

    @property
    def is_done(self) -> bool:
        return self.state == "ended" and all(each.is_done for each in self.children)


class RequestsInMemory(RuleBasedStateMachine):
    """Any order of requests that are taken, replaced, repeated, failed, and cancelled."""

    @initialize()
    def start(self) -> None:
        self.engine = Engine()
        self.in_flight = tracked(self.engine)
        self.nodes: list[Node] = []
        self.done: list[int] = []
        self.parents: list[tuple[Request, Node]] = []  # which request led to which object

    def new(self, request: Request) -> Node:
        node = Node(len(self.nodes), request)
        self.nodes.append(node)
        return node

    def among(self, data: st.DataObject, *states: str) -> Node:
        return data.draw(st.sampled_from([each for each in self.nodes if each.state in states]))

    def has(*states: str):
        return precondition(lambda self: any(each.state in states for each in self.nodes))

    @rule()
    def take_from_the_store(self) -> None:
        self.take(self.new(Request(URL)))

    @has("pending")
    @rule(data=st.data())
    def take_from_memory(self, data: st.DataObject) -> None:
        node = self.among(data, "pending")
        # Scrapy's queue in memory has the same object twice: the first comes first.
        self.take(next(each for each in self.nodes if is_pending(each, node.request)))

    def take(self, node: Node) -> None:
        name = node.name
        self.in_flight.add(node.request, lambda _: self.done.append(name))
        node.state = "downloading"
        node.downloaded = self.engine.downloader.fetch(node.request)

    @has("handled")
    @rule(data=st.data(), is_stored=st.booleans())
    def lead_to_a_request(self, data: st.DataObject, is_stored: bool) -> None:
        parent = self.among(data, "handled")
        requests = [None, *{id(each.request): each.request for each in self.nodes}.values()]
        request = data.draw(st.sampled_from(requests), label="object") or Request(URL)
        flight = self.in_flight.handled(parent.request, parent.result)
        assert flight is not None
        self.in_flight.led_to(flight, request)
        self.parents.append((request, parent))
        if not is_stored:
            self.keep_in_memory(request)

    def keep_in_memory(self, request: Request) -> None:
        """All requests wait for an object that they have led to, if they are not done."""
        child = self.new(request)
        self.in_flight.keep_in_memory(request, lambda _: self.done.append(child.name))
        for each, parent in self.parents:
            if each is request and not parent.is_done:
                parent.children.append(child)

    @has("downloading")
    @rule(data=st.data(), fails=st.booleans())
    def get_a_response(self, data: st.DataObject, fails: bool) -> None:
        node = self.among(data, "downloading")
        if fails:  # two failures of one object cannot be distinguished
            node = next(
                each
                for each in self.nodes
                if each.request is node.request and each.state == "downloading"
            )
        result = Failure(OSError()) if fails else Response(URL)
        assert node.downloaded is not None
        node.downloaded.addErrback(lambda _: None)
        node.downloaded.callback(result) if not fails else node.downloaded.errback(result)
        node.result = Failure(result.value) if fails else result
        node.handled = self.engine.scraper.enqueue_scrape(node.result, node.request)
        node.state = "handled"

    @has("downloading")
    @rule(data=st.data())
    def get_another_request(self, data: st.DataObject) -> None:
        node = self.among(data, "downloading")
        retry = Request(URL)
        assert node.downloaded is not None
        node.downloaded.callback(retry)
        self.parents.append((retry, node))
        self.keep_in_memory(retry)
        self.in_flight.end_replaced()
        node.state = "ended"

    @has("handled")
    @rule(data=st.data(), leaves=st.booleans())
    def end(self, data: st.DataObject, leaves: bool) -> None:
        node = self.among(data, "handled")
        if leaves:  # the queue refuses more of its output
            flight = self.in_flight.handled(node.request, node.result)
            assert flight is not None
            self.in_flight.leave(flight)
        assert node.handled is not None
        node.handled.callback(None)
        node.state = "left" if leaves else "ended"

    @invariant()
    def are_done(self) -> None:
        if not hasattr(self, "nodes"):
            return
        assert sorted(self.done) == [each.name for each in self.nodes if each.is_done]
        in_flight = [each for each in self.nodes if each.state in {"downloading", "handled"}]
        assert len(self.in_flight) == len(in_flight)

    def teardown(self) -> None:
        for each in self.nodes:
            for deferred in (each.downloaded, each.handled):
                if deferred is not None:
                    deferred.addErrback(lambda _: None)


def is_pending(node: Node, request: Request) -> bool:
    return node.state == "pending" and node.request is request


TestRequestsInMemory = RequestsInMemory.TestCase
TestRequestsInMemory.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_flight_that_has_ended_keeps_no_request() -> None:
    """A chain of requests in memory takes little memory while its first request waits."""
    in_flight = tracked(Engine())
    flight: Flight = in_flight.add(Request(URL))
    in_flight.keep_in_memory(child := Request(URL), lambda _: None)
    in_flight.led_to(flight, child)
    in_flight.end(flight)
    assert flight.request is None
    assert len(in_flight) == 0


def test_a_flight_that_waits_for_one_in_memory_is_not_done() -> None:
    """Otherwise, another suspect would be taken next to a suspect that waits."""
    in_flight = tracked(Engine())
    assert in_flight.is_idle
    parent = in_flight.add(Request(URL))
    in_flight.led_to(parent, child := Request(URL))
    in_flight.keep_in_memory(child, lambda _: None)
    in_flight.end(parent)
    assert not in_flight.is_idle
    in_flight.end(in_flight.add(child))
    assert in_flight.is_idle


def test_a_flight_that_waits_for_an_answer_is_not_done() -> None:
    in_flight = tracked(Engine())
    flight = in_flight.add(Request(URL))
    flight.waits_for += 1
    in_flight.end(flight)
    assert not in_flight.is_idle
    in_flight.release(flight)
    assert in_flight.is_idle
