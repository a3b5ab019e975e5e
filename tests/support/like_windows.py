"""Take away from a process what Windows has not, as far as that can be done on Linux.

Names are missing, a file that is open or mapped is neither renamed nor removed, nothing is renamed
onto another file, a directory cannot be opened, and what is open for reading only is not synced.
"""

import errno
import fcntl
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_MISSING = {
    os: (
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_SYNC", "fdatasync", "posix_fallocate"),
        *("pread", "pwrite", "sendfile", "mkfifo", "major", "minor", "statvfs", "fchmod", "fchown"),
        *("fork", "killpg", "setsid", "wait3", "sched_getaffinity", "getloadavg"),
    ),
    signal: ("SIGKILL", "SIGHUP", "SIGPIPE", "SIGUSR1", "alarm", "pthread_sigmask"),
    select: ("poll",),
}
_ASKING = (
    "scrapy_bloom.commands",
    "scrapy_bloom.files.file",
    "scrapy_bloom.job.jobdir",
)
_readlink, _listdir, _open, _fsync = os.readlink, os.listdir, os.open, os.fsync


class _Windows:
    """The module sys, for those of ours that ask it for the system."""

    platform = "win32"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def pretend() -> None:
    """Take away from this process what Windows lacks, for good."""
    for name in _ASKING:
        import_module(name).sys = _Windows()
    # The lock of filelock for Windows needs none of these names, but does not work here.
    import_module("filelock")
    for name, module in sys.modules.items():
        if name.startswith("filelock.") and hasattr(module, "os"):
            module.os = SimpleNamespace(**vars(os))  # type: ignore[attr-defined]
    for module, names in _MISSING.items():
        for name in names:
            delattr(module, name)
    os.open = _open_no_directory
    shutil._use_fd_functions = False  # of directories
    os.fsync = _fsync_if_writable
    for name in ("open", "exists", "read_text", "readlink", "iterdir"):
        _change(name, _refuse_proc)
    for name in ("unlink", "rename", "replace"):
        _change(name, _refuse_open_files)
    _change("rename", _refuse_what_exists)


def _change(name: str, refuse: Callable[..., None]) -> None:
    method = getattr(Path, name)

    def changed(path: Path, *args: Any, **options: Any) -> Any:
        try:
            refuse(path, *args)
        except FileNotFoundError:
            if name == "exists":
                return False
            raise
        return method(path, *args, **options)

    setattr(Path, name, changed)


def _refuse_proc(path: Path, *_: object) -> None:
    if os.fspath(path).startswith("/proc/"):
        raise FileNotFoundError(errno.ENOENT, "there is no such thing", os.fspath(path))


def _refuse_open_files(*paths: object) -> None:
    used = set(_used_files())
    for path in paths:
        if isinstance(path, str | Path) and os.path.realpath(path) in used:
            raise PermissionError(errno.EACCES, "another program has the file open", str(path))


def _refuse_what_exists(_: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "it exists already", os.fspath(target))


def _used_files() -> list[str]:
    """Return the files that this process has open, or mapped."""
    used = []
    for fd in _listdir("/proc/self/fd"):
        try:
            used.append(_readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # that of the list itself
            continue
    fd = _open("/proc/self/maps", os.O_RDONLY)
    with os.fdopen(fd, encoding="utf-8", errors="replace") as maps:
        used += [line.rstrip("\n").split(maxsplit=5)[-1] for line in maps]
    return used


def _open_no_directory(path: Any, *args: Any, **options: Any) -> int:
    if not isinstance(path, int) and Path(path).is_dir():
        raise PermissionError(errno.EACCES, "a directory cannot be opened", path)
    return _open(path, *args, **options)


def _fsync_if_writable(fd: int) -> None:
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    _fsync(fd)
