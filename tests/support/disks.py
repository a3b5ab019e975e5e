"""A disk of its own for a test, whose power can be cut: an ext4 file system in a file."""

import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

_SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_FLUSHING = struct.pack("I", 2)


class Disk:
    """A mounted disk of 64 MB.

    Args:
        directory: for its image, and where it is mounted.

    Raises:
        OSError: this machine, or this user, cannot do that.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "disk"
        self.path.mkdir(parents=True)
        self._image = directory / "image"
        self._restarts = 0
        with self._image.open("wb") as image:
            image.truncate(64 << 20)
        _run("mkfs.ext4", "-q", "-F", self._image)
        self._mount()

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
        self.end()
        self._restarts += 1
        copy = self._image.with_name(f"image-{self._restarts}")
        shutil.copyfile(self._image, copy)
        self._image.unlink()
        self._image = copy
        self._mount()

    def end(self) -> None:
        """Unmount it."""
        _run("umount", self.path)

    def _mount(self) -> None:
        _run("mount", "-o", "loop", self._image, self.path)


def _run(*command: str | Path) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if ended.returncode:
        raise OSError(ended.stderr)
