"""A server that is further away: a proxy on loopback that delays what goes to it and comes back."""

import asyncio
import ctypes
import multiprocessing
import selectors
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from statistics import quantiles
from typing import Any, cast

import redis

_PINGS = 1000
_SPIN_SECS = 0.0001  # before each sending: a process that sleeps wakes up about that much late
_PR_SET_TIMERSLACK = 29


class DistantServer:
    """A server on loopback behind a proxy, a process of its own, that delays each direction.

    The proxy does not throttle: bytes keep their distances, and commands may overlap.

    Args:
        port_of_server: on 127.0.0.1.
        secs: to add to a round trip. What the proxy itself takes is measured, and is part of it.

    Attributes:
        port: where the clients connect to, on 127.0.0.1.
    """

    def __init__(self, port_of_server: int, secs: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, its_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(port_of_server, its_end), daemon=True)
        self._process.start()
        its_end.close()  # if that process ends, so does the wait for it
        self._control.send(secs / 2)
        self.port = int(self._control.recv())
        # The quarter that was fastest: what else the machine does must not shorten the delay.
        excess = ping_secs(self.port)[0] - ping_secs(port_of_server)[0] - secs
        self._delay_secs = min(max(secs - excess, 0.0), secs) / 2
        self._control.send(self._delay_secs)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Forward nothing meanwhile; then, all that came in the meantime."""
        self._control.send(None)
        try:
            yield
        finally:
            self._control.send(self._delay_secs)

    def end(self) -> None:
        """End all connections."""
        self._process.kill()
        self._process.join()


def ping_secs(port: int) -> list[float]:
    """25th percentile, median and 75th percentile of many PINGs, on one connection."""
    secs = []
    with cast("Any", redis.Redis(host="127.0.0.1", port=port)) as client:
        client.ping()
        for _ in range(_PINGS):
            begun = time.perf_counter()
            client.ping()
            secs.append(time.perf_counter() - begun)
    return quantiles(secs, n=4)


def _serve(port_of_server: int, control: Connection) -> None:
    # epoll waits for whole milliseconds; select for microseconds, without the slack of Linux.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    loop.run_until_complete(_Proxy(port_of_server, control).serve())


class _Proxy:
    def __init__(self, port_of_server: int, control: Connection) -> None:
        self._port_of_server = port_of_server
        self._control = control
        self._is_near = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []  # else they might be collected
        self._change()

    async def serve(self) -> None:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        asyncio.get_running_loop().add_reader(self._control.fileno(), self._change)
        self._control.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    def _change(self) -> None:
        delay_secs: float | None = self._control.recv()
        if delay_secs is None:
            self._is_near.clear()
        else:
            self._delay_secs = delay_secs
            self._is_near.set()

    async def _forward(self, *client: Any) -> None:
        server = await asyncio.open_connection("127.0.0.1", self._port_of_server)
        for (reader, _), (_, writer) in ((client, server), (server, client)):
            queue: _Queue = asyncio.Queue()
            for work in (self._read(reader, queue), self._write(queue, writer)):
                self._tasks.append(asyncio.create_task(work))

    async def _read(self, reader: asyncio.StreamReader, queue: "_Queue") -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                queue.put_nowait((time.monotonic() + self._delay_secs, data))
        queue.put_nowait((time.monotonic() + self._delay_secs, b""))

    async def _write(self, queue: "_Queue", writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - time.monotonic() - _SPIN_SECS)
            while time.monotonic() < due:
                pass
            await self._is_near.wait()
            if not data:
                return writer.close()
            writer.write(data)


_Queue = asyncio.Queue[tuple[float, bytes]]  # when to send it, and what; nothing is the end
