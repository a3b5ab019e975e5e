"""Disks of their own for a test: ext4 file systems in files, whose power or writes can fail."""

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support.machine import REQUIRED

SIZE = 64 << 20
_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_FLUSHING = struct.pack("I", 2)
_ROOM = 4 * SIZE  # for an image and its copies


class Disk:
    """A mounted disk of 64 MB, whose power can be cut.

    An OSError says that this machine, or this user, cannot do that.
    """

    size = SIZE
    _made_by: Sequence[str] = ("mkfs.ext4", "-q", "-F", "-b", "4096")  # as large disks have it

    def __init__(self, directory: Path) -> None:
        self.path = directory / "disk"
        self.path.mkdir(parents=True)
        self._image = directory / "image"
        self._restarts = 0
        with self._image.open("wb") as image:
            image.truncate(self.size)
        _run(*self._made_by, self._image)
        self._mount()

    def fill(self) -> None:
        """Use up all room that is left."""
        with (self.path / "filler").open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 10, 1):
                with contextlib.suppress(OSError):
                    while file.write(b"x" * size):
                        pass
            os.fsync(file.fileno())

    def free(self) -> None:
        """Make room again."""
        (self.path / "filler").unlink()

    def cut(self) -> None:
        """Cut the power: from now on, nothing reaches the disk any more."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, _WITHOUT_FLUSHING)
        finally:
            os.close(fd)

    def restart(self) -> None:
        """Mount it anew: all is as it was on the disk. Whoever used it must have ended.

        It is a copy of the image. A mount namespace that another test has made meanwhile keeps the
        file system that was cut off, and the same image would be that one again.
        """
        self._unmount()
        self._restarts += 1
        copy = self._image.with_name(f"image-{self._restarts}")
        shutil.copyfile(self._image, copy)
        self._image.unlink()
        self._image = copy
        self._mount()

    def end(self) -> None:
        """Unmount it."""
        self._unmount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop", self._image, self.path)

    def _unmount(self) -> None:
        _run("umount", self.path)


class FailingDisk(Disk):
    """A disk that fails to write: the kernel finds that out when it writes its pages to the disk.

    Its image is a sparse file on a file system that can be made full. Blocks that were written
    before can still be read and overwritten.
    """

    def __init__(self, directory: Path) -> None:
        self._store = directory / "store"
        self._store.mkdir(parents=True)
        _run("mount", "-t", "tmpfs", "-o", f"size={_ROOM}", "none", self._store)
        try:
            super().__init__(self._store)
        except BaseException:
            _run("umount", self._store)
            raise

    def fail(self) -> None:
        """Fail to write to all blocks that were never written, the journal's among them."""
        os.sync()
        for _ in range(10):
            store = os.statvfs(self._store)
            used = (store.f_blocks - store.f_bfree) * store.f_frsize
            with contextlib.suppress(OSError):  # it has become more since
                _run("mount", "-o", f"remount,size={used}", self._store)
                return
        raise AssertionError("the disk is in use")

    def repair(self) -> None:
        """Fail no more."""
        _run("mount", "-o", f"remount,size={_ROOM}", self._store)

    def end(self) -> None:
        """Unmount it."""
        super().end()
        end_of_wait = time.monotonic() + 30
        while True:  # the kernel lets go of the image a moment after the disk is unmounted
            try:
                return _run("umount", self._store)
            except OSError:
                if time.monotonic() >= end_of_wait:
                    raise
                time.sleep(0.1)


_D = TypeVar("_D", bound=Disk)


@contextlib.contextmanager
def mounted(kind: type[_D], directory: Path) -> Iterator[_D]:
    """Make a disk for a test, which is skipped where none can be mounted, unless it has to be."""
    try:
        disk = kind(directory)
    except OSError as error:
        if "small-disk" in REQUIRED:
            raise
        pytest.skip(f"no disk can be mounted: {error}")
    try:
        yield disk
    finally:
        disk.end()


def _run(*command: str | Path) -> None:
    if shutil.which(command[0]) is None:
        raise OSError(f"there is no {command[0]}")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode:
        raise OSError(ended.stderr)
