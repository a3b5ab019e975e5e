"""A proxy in front of a server, which loses some of its replies."""

import contextlib
import random
import selectors
import socket
import socketserver
import threading
import time

_LIMIT = 10.0  # seconds that any single wait may take
_MOST = 1 << 16  # bytes at once


class DroppingProxy(socketserver.ThreadingTCPServer):
    """Forwards connections to a server on loopback, and drops some of its replies.

    The server has got the command and has answered; then, instead of the answer, the client gets
    the end of its connection. Whatever a client sends at once, also a pipeline, has one reply.
    It drops a share of the replies, perhaps only of those to commands that contain some text. Each
    reply comes after a delay in seconds.
    """

    daemon_threads = True

    def __init__(
        self, port_of_server: int, rate: float = 0.0, seed: int = 1, *, only: bytes = b""
    ) -> None:
        self.dropped, self.delay = 0, 0.0
        self._server_address = ("127.0.0.1", port_of_server)
        self._rate = rate
        self._random = random.Random(seed)
        self._only = only
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def end(self) -> None:
        """End all connections."""
        self.shutdown()
        with self._lock:
            for each_socket in self._sockets:
                with contextlib.suppress(OSError):
                    each_socket.shutdown(socket.SHUT_RDWR)
        self.server_close()

    def __exit__(self, *args: object) -> None:
        self.end()

    def finish_request(self, request: socket.socket, client_address: object) -> None:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(self._server_address, timeout=_LIMIT) as server,
        ):
            with self._lock:
                self._sockets |= {request, server}
            try:
                self._forward(request, server)
            finally:
                with self._lock:
                    self._sockets -= {request, server}

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        asked = b""  # what the server has not begun to answer yet
        with selectors.DefaultSelector() as selector:
            for entry in (client, server):
                entry.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                selector.register(entry, selectors.EVENT_READ)
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
                    time.sleep(self.delay)
                    client.sendall(data)

    def _drops(self, asked: bytes) -> bool:
        """Return whether the reply to these commands is dropped, with its connection."""
        with self._lock:
            drops = self._only in asked and self._random.random() < self._rate
            self.dropped += drops
            return drops
