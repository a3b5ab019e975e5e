"""What runs in a forked process of Scrapy."""

import atexit
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import scrapy.cmdline

_OUTSIDE = [path for path in sys.path if Path(path).name != "example_project"]


def run(arguments: list[str], cwd: Path, env: dict[str, str], streams: list[Connection]) -> None:
    """Become `scrapy ARGUMENTS` in a process just forked."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup, it and the next are ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.path[:] = [os.fspath(cwd), *_OUTSIDE]
    sys.argv = ["scrapy", *arguments]
    try:
        scrapy.cmdline.execute()
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out
        sys.stdout.flush()
