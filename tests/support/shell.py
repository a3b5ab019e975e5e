"""Shell commands of the documents, where `scrapy` is a process forked from one that has it.

In the PATH of the commands, `scrapy` is a few lines that hand their arguments, their directory and
their streams to a thread of the test, and end as the process that it starts ends.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from tests.support.processes import start_scrapy

LIMIT = 120.0  # seconds
_CLIENT = f"""#!{sys.executable} -IS
import json, os, socket, sys
known = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.path.join(os.path.dirname(__file__), "socket"))
    socket.send_fds(connection, [len(known).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(known)
    status = connection.recv(1)
sys.exit(status[0] if status else 1)
"""


# For machines without Redis's own: redis-cli -u URL --raw COMMAND...
_REDIS_CLI = f"""#!{sys.executable}
import sys
import redis
for member in redis.Redis.from_url(sys.argv[2]).execute_command(*sys.argv[4:]):
    print(member.decode())
"""


def run_in_shell(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run commands in bash, up to the first that fails."""
    with tempfile.TemporaryDirectory() as programs, socket.socket(socket.AF_UNIX) as listening:
        client = Path(programs, "scrapy")
        client.write_text(_CLIENT)
        client.chmod(0o755)
        if shutil.which("redis-cli") is None:
            (cli := Path(programs, "redis-cli")).write_text(_REDIS_CLI)
            cli.chmod(0o755)
        listening.bind(os.fspath(Path(programs, "socket")))
        listening.listen()
        threading.Thread(target=_answer, args=(listening,), daemon=True).start()
        path = os.pathsep.join(
            [programs, os.fspath(Path(sys.executable).parent), os.environ["PATH"]]
        )
        try:
            return subprocess.run(
                ["bash", "-euo", "pipefail", "-c", code],
                cwd=cwd,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                timeout=LIMIT,
                check=False,
            )
        finally:
            listening.shutdown(socket.SHUT_RDWR)  # ends the thread


def _answer(listening: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was shut down
        while True:
            connection, _ = listening.accept()
            threading.Thread(target=_run, args=(connection,), daemon=True).start()


def _run(connection: socket.socket) -> None:
    with connection:
        length, streams, *_ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as asked:
            arguments, cwd, env = json.loads(asked.read(int.from_bytes(length, "big")))
        given, out, err = (os.fdopen(stream, "wb") for stream in streams)
        with given, out, err:
            process = start_scrapy(arguments, cwd=cwd, given=given, out=out, err=err, env=env)
            status = process.wait(LIMIT)
        if status is None:
            process.kill()
        connection.sendall(bytes([status if status in range(256) else 1]))
