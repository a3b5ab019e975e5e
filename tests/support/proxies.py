"""Proxies in front of a server: one loses some of its replies, one speaks TLS for it."""

import contextlib
import random
import selectors
import socket
import ssl
import threading
from pathlib import Path

_LIMIT = 10.0  # seconds that any single wait may take
_MOST = 1 << 16  # bytes at once; a record of TLS has less, so that none is left where no one looks


class _Proxy:
    """Forwards connections to a server on loopback.

    Args:
        port_of_server: on 127.0.0.1.

    Attributes:
        port: where the clients connect to, on 127.0.0.1.
    """

    def __init__(self, port_of_server: int) -> None:
        self._port_of_server = port_of_server
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
        with client, contextlib.suppress(OSError), self._greeted(client) as greeted:
            address = ("127.0.0.1", self._port_of_server)
            with socket.create_connection(address, timeout=_LIMIT) as server:
                ends = {greeted, server}
                with self._lock:
                    if self._ended:
                        return
                    self._sockets |= ends
                try:
                    self._forward(greeted, server)
                finally:
                    with self._lock:
                        self._sockets -= ends

    def _greeted(self, client: socket.socket) -> socket.socket:
        """Return the socket to forward for a connection that was just accepted."""
        return client

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
                    if not (data := client.recv(_MOST)):
                        return
                    asked += data
                    server.sendall(data)
                if server in ready:
                    if not (data := server.recv(_MOST)):
                        return
                    if asked and self._drops(asked):
                        return
                    asked = b""
                    client.sendall(data)

    def _drops(self, asked: bytes) -> bool:
        """Return whether the reply to these commands is dropped, with its connection."""
        return False


class DroppingProxy(_Proxy):
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
        self._rate = rate
        self._random = random.Random(seed)
        self._only = only
        super().__init__(port_of_server)

    def _drops(self, asked: bytes) -> bool:
        with self._lock:
            drops = self._only in asked and self._random.random() < self._rate
            self.dropped += drops
            return drops


class TLSProxy(_Proxy):
    """Speaks TLS for a server on loopback that cannot.

    As with a server that can, nobody gets through without TLS; but for the other servers, which
    cannot speak it either and come from an address of their own.

    Args:
        port_of_server: on 127.0.0.1.
        certificate: a file with the certificate and its key.
        address_of_servers: where the connections of other servers come from.

    Attributes:
        port: where clients and servers connect to, on 127.0.0.1.
    """

    def __init__(self, port_of_server: int, certificate: Path, address_of_servers: str) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._address_of_servers = address_of_servers
        super().__init__(port_of_server)

    def _greeted(self, client: socket.socket) -> socket.socket:
        if client.getpeername()[0] == self._address_of_servers:
            return client
        client.settimeout(_LIMIT)  # for the handshake, too
        return self._context.wrap_socket(client, server_side=True)


def _shut_down(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Of what is below TLS: the thread that serves it may be in the middle of a record.
        socket.socket.shutdown(each, socket.SHUT_RDWR)
