"""A proxy in front of a server, that loses some of its replies."""

import contextlib
import random
import selectors
import socket
import threading

_LIMIT = 10.0  # seconds that any single wait may take


class DroppingProxy:
    """Forwards connections to a server on loopback, and drops some of its replies.

    The server has got the command and has answered; then, instead of the answer, the client gets
    the end of its connection. Whatever a client sends at once, also a pipeline, has one reply.

    Args:
        port_of_server: on 127.0.0.1.
        rate: the share of replies that are dropped.
        seed: of the random numbers that decide which.
        only: drop only replies to commands that contain this.

    Attributes:
        port: where the clients connect to, on 127.0.0.1.
        dropped: number of replies dropped.
    """

    def __init__(self, port_of_server: int, rate: float, seed: int, *, only: bytes = b"") -> None:
        self.dropped = 0
        self._port_of_server = port_of_server
        self._rate = rate
        self._random = random.Random(seed)
        self._only = only
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._ended = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def end(self) -> None:
        """End all connections."""
        with self._lock:
            self._ended = True
            for each in self._sockets:
                _shut_down(each)
        _shut_down(self._listener)  # wakes up the accept
        self._acceptor.join(_LIMIT)
        self._listener.close()
        for thread in self._threads:
            thread.join(_LIMIT)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            address = ("127.0.0.1", self._port_of_server)
            with socket.create_connection(address, timeout=_LIMIT) as server:
                ends = {client, server}
                with self._lock:
                    if self._ended:
                        return
                    self._sockets |= ends
                try:
                    self._forward(client, server)
                finally:
                    with self._lock:
                        self._sockets -= ends

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        asked = b""  # what the server has not begun to answer yet
        with selectors.DefaultSelector() as selector:
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(each, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                # Its command first: there is no answer before it.
                if client in ready:
                    if not (data := client.recv(1 << 16)):
                        return
                    asked += data
                    server.sendall(data)
                if server in ready:
                    if not (data := server.recv(1 << 16)):
                        return
                    if asked and self._drops(asked):
                        return
                    asked = b""
                    client.sendall(data)

    def _drops(self, asked: bytes) -> bool:
        with self._lock:
            drops = self._only in asked and self._random.random() < self._rate
            self.dropped += drops
            return drops


def _shut_down(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
