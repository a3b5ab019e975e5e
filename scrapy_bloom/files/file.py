"""Read and write a filter file: a header of 4 KiB, then the blocks. Numbers are big-endian.

    offset  bytes  content
         0      8  magic
         8      2  format version
        10      2  hash scheme
        12      2  variant (1)
        14      2  num_hashes
        16      8  num_blocks
        24      8  capacity
        32      8  error_rate, a double
        40      8  first_run, seconds since 1970, a double
        48      4  generation number
        52     16  salt
        68      2  length of the fingerprinter's import path, then up to 1,024 bytes of UTF-8
      1094      2  length of the spider's name, then up to 1,024 bytes of UTF-8
      2120      8  error rate of the whole filter, a double; 0 if unknown
      2128         zeros
      4068      4  CRC32 of all bytes before it; nothing up to here ever changes
      4072      8  state word: number of the oldest live generation
      4080      8  state word: last_run, milliseconds since 1970
      4088      8  state word: 1 bit "in use", 47 bits count

A state word is a value of 48 bits and a CRC of its six bytes. The words change while a crawl runs,
and must survive a kill at any instant. An aligned 8-byte store is one instruction, so a reader sees
either the old or the new word, never half of each. The CRC detects a damaged byte.
"""

import binascii
import contextlib
import errno
import math
import mmap
import os
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from scrapy_bloom.exceptions import FilterFileError, StorageError
from scrapy_bloom.filters.bloom import BloomFilter
from scrapy_bloom.filters.hashing import HASH_SCHEME, SALT_BYTES
from scrapy_bloom.filters.sizing import Geometry
from scrapy_bloom.generations.memory import LocalGeneration
from scrapy_bloom.generations.policy import Generation, Origin, check_asked, check_generation
from scrapy_bloom.job.copy_on_write import overwrite_in_place, reserve
from scrapy_bloom.job.disk import (
    advice,
    create,
    opened,
    sync_directory,
)

MAGIC = b"\x89BLOOM\r\n"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
_PLAIN = 1  # the only variant
_FIGURES = ("capacity", "error_rate", "first_run", "number")

_VERSION = struct.Struct(">H")
_TEXT_BYTES = 1024
_BODY = struct.Struct(f">8sHHHHQQddI{SALT_BYTES}sH{_TEXT_BYTES}sH{_TEXT_BYTES}sd")
_CRC = struct.Struct(">I")
_CRC_OFFSET = 4068
_WORDS_OFFSET = 4072
_IN_USE = 1 << 47
_MAX_COUNT = _IN_USE - 1
_MAX_VALUE = (1 << 48) - 1


@dataclass(eq=False, kw_only=True)
class FileGeneration(Generation):
    """A generation as described by the header of its file."""

    path: Path
    origin: Origin  # spider, fingerprinter, salt and error rate of the filter; the salt is set
    in_use: bool = False  # a crawl without a log uses the file, or used it and did not close it
    oldest: int = 1  # number of the oldest live generation; older files can be removed

    @classmethod
    def at(cls, path: Path) -> "FileGeneration":
        """Read and check the header of a file, without changing or locking anything.

        Raises:
            FilterFileError: the file is truncated, foreign, damaged or of a newer format.
            StorageError: the file cannot be read.
        """
        try:
            with opened(path) as file:
                raw = file.read(HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        found = _unpack(path, raw)
        expected = HEADER_BYTES + found.geometry.nbytes
        if size != expected:
            raise _unusable(path, f"has {size:,} bytes, but its header says {expected:,}")
        return found

    @property
    def salt(self) -> bytes:
        """The salt of the filter, 16 bytes."""
        assert self.origin.salt is not None
        return self.origin.salt


def pack_header(file: FileGeneration) -> bytes:
    """Return the constant part of a header, up to and including its CRC."""
    body = _BODY.pack(
        MAGIC,
        FORMAT_VERSION,
        HASH_SCHEME,
        _PLAIN,
        file.geometry.num_hashes,
        file.geometry.num_blocks,
        *(getattr(file, name) for name in _FIGURES),
        file.salt,
        *_measured(file.origin.fingerprinter),
        *_measured(file.origin.spider),
        file.origin.error_rate,
    ).ljust(_CRC_OFFSET, b"\0")
    return body + _CRC.pack(binascii.crc32(body))


def write_state(words: memoryview, file: FileGeneration, count: int) -> None:
    """Write the state words into a mapped header, given as native 64-bit words."""
    # After a kill in between, nothing expires too early: the count and the in-use flag come last.
    values = (
        file.oldest,
        math.ceil(file.last_run * 1000),
        min(count, _MAX_COUNT) | (_IN_USE if file.in_use else 0),
    )
    for index, value in enumerate(values, _WORDS_OFFSET // 8):
        data = min(value, _MAX_VALUE).to_bytes(6, "big")
        words[index] = int.from_bytes(data + _word_crc(data).to_bytes(2, "big"), sys.byteorder)


def _unpack(path: Path, raw: bytes) -> FileGeneration:
    if raw[: len(MAGIC)] != MAGIC[: len(raw)]:
        raise _unusable(path, "is not a filter of scrapy_bloom (its first bytes differ)")
    if len(raw) < HEADER_BYTES:
        raise _unusable(path, f"is cut off after {len(raw):,} bytes")
    if (version := _VERSION.unpack_from(raw, len(MAGIC))[0]) > FORMAT_VERSION:
        raise FilterFileError(
            f"{path} has format version {version} (or is damaged), and this scrapy_bloom supports "
            f"versions up to {FORMAT_VERSION}; upgrade scrapy_bloom to use it. It was left as it is"
        )
    if binascii.crc32(raw[:_CRC_OFFSET]) != _CRC.unpack_from(raw, _CRC_OFFSET)[0]:
        raise _unusable(path, "has a damaged header (its checksum is wrong)")
    _, _, scheme, variant, num_hashes, num_blocks, *figures_and_origin = _BODY.unpack_from(raw)
    *figures, salt, length, fingerprinter, spider_length, spider, asked = figures_and_origin
    if scheme != HASH_SCHEME or variant != _PLAIN:
        raise _unusable(path, f"is of hash scheme {scheme}, variant {variant}, which is unknown")
    oldest, milliseconds, count = _unpack_state(path, raw[_WORDS_OFFSET:])
    found = FileGeneration(
        path=path,
        geometry=Geometry(num_blocks, num_hashes),
        **dict(zip(_FIGURES, figures, strict=True)),
        last_run=milliseconds / 1000,
        count=count & _MAX_COUNT,
        origin=Origin(
            salt=salt,
            fingerprinter=fingerprinter[:length].decode("utf-8", "replace"),
            spider=spider[:spider_length].decode("utf-8", "replace"),
            error_rate=asked,
        ),
        in_use=bool(count & _IN_USE),
        oldest=oldest,
    )
    try:
        check_generation(found, oldest=oldest)
        check_asked(asked)
    except ValueError as error:
        raise _unusable(path, f"has impossible figures in its header ({error})") from None
    return found


def _unusable(path: Path, what: str) -> FilterFileError:
    return FilterFileError(
        f"{path} {what}; it was left as it is: restore it from a backup, or move all "
        "generation-*.bloom files of the directory away to start with an empty filter (pages "
        "crawled before are then crawled again)"
    )


def _unpack_state(path: Path, raw: bytes) -> list[int]:
    values = []
    for data, crc in struct.iter_unpack(">6sH", raw):
        if _word_crc(data) != crc:
            raise _unusable(path, "has a damaged header (the checksum of its state is wrong)")
        values.append(int.from_bytes(data, "big"))
    return values


def _word_crc(data: bytes) -> int:
    return binascii.crc_hqx(data, 0xFFFF)  # CRC-16/CCITT finds any single damaged byte


def clip(text: str) -> str:
    """Cut a text to the first 1,024 bytes of its UTF-8, which a header can hold."""
    return text.encode("utf-8", "replace")[:_TEXT_BYTES].decode("utf-8", "ignore")


def _measured(text: str) -> tuple[int, bytes]:
    data = clip(text).encode()
    return len(data), data


_ZEROS = bytes(1 << 20)


class FilterFile(FileGeneration, LocalGeneration):
    """A generation whose file is mapped into memory; `create` and `open` return one."""

    def __init__(self, found: FileGeneration, *, readonly: bool = False) -> None:
        super().__init__(**vars(found))
        access, mode = mmap.ACCESS_WRITE, "r+b"
        if readonly:
            access, mode = mmap.ACCESS_READ, "rb"
        self._file = opened(found.path, mode, buffering=0)
        try:
            size = HEADER_BYTES + found.geometry.nbytes
            if not readonly:
                reserve(self._file, size)
            self._map = mmap.mmap(self._file.fileno(), size, access=access)
        except BaseException:
            self._file.close()
            raise
        self._view = memoryview(self._map)
        self._words = self._view[:HEADER_BYTES].cast("Q")
        self.filter = BloomFilter.from_buffer(
            self._view[HEADER_BYTES:],
            found.geometry,
            capacity=found.capacity,
            error_rate=found.error_rate,
            salt=found.salt,
        )

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> "FilterFile":
        """Map an existing file, in the same time whatever its size.

        Args:
            path: of the file.
            readonly: map it for reading only, also while a crawl writes to it.

        Raises:
            FilterFileError: the file is truncated, foreign, damaged or of a newer format.
            StorageError: the file cannot be read, or not be written.
        """
        found = FileGeneration.at(path)
        try:
            return cls(found, readonly=readonly)
        except OSError as error:
            why = error.strerror or error
            if readonly:
                raise StorageError(f"{path} cannot be read: {why}") from error
            raise StorageError(
                f"{path} cannot be opened for writing: {why}; {advice(error)}"
            ) from error

    @classmethod
    def create(
        cls, new: FileGeneration, fill: Callable[[BloomFilter], int] | None = None
    ) -> "FilterFile":
        """Create a new file atomically, with all its space reserved.

        Args:
            new: the header and the path; the file must not exist yet.
            fill: adds fingerprints to the new filter, and returns how many were new.

        Raises:
            StorageError: the disk is full, or the directory is not writable; nothing is left.
        """
        path = new.path
        if path.exists():
            raise StorageError(f"{path} exists already, and was not replaced; move it away")
        begun = draft = path.with_name(path.name + ".tmp")
        size = HEADER_BYTES + new.geometry.nbytes
        try:
            _reserve(draft, size)
            with opened(draft, "r+b") as file:
                file.write(pack_header(new))
            with contextlib.closing(cls(replace(new, path=draft))) as mapped:
                mapped.count = fill(mapped.filter) if fill else 0
                mapped.save()
                mapped.sync()
            begun = draft.rename(path)  # after the close, because Windows renames no open file
            created = cls.open(path)
        except BaseException as error:
            with contextlib.suppress(OSError):
                begun.unlink()
            if isinstance(error, OSError):
                raise StorageError(_no_room(path, size, error)) from error
            raise
        sync_directory(path.parent)
        return created

    def save(self) -> None:
        """Write the state words into the header; a kill at any instant leaves it readable."""
        write_state(self._words, self, self.count - self.unapplied)

    def sync(self) -> None:
        """Sync the file to the disk; may be called in any thread; raises OSError."""
        # Unlike mmap.flush(), fsync() lets other threads run, and Linux and FreeBSD write the pages
        # of a shared mapping with it. Other systems document only flush().
        if not sys.platform.startswith(("linux", "freebsd")):
            self._map.flush()
        os.fsync(self._file.fileno())

    def is_in_place(self) -> bool:
        """Return False if the file was removed or replaced by another file."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:  # for example, the directory is not readable: assume no change
            return error.errno != errno.ESTALE

    def close(self) -> None:
        """Unmap the file without syncing it."""
        self.is_closed = True
        self.filter.release()
        self._words.release()
        self._view.release()
        # After an interrupt, a frame of the traceback may still refer to the map, which is then
        # closed with the last reference.
        with contextlib.suppress(BufferError):
            self._map.close()
        self._file.close()


def _reserve(path: Path, size: int) -> None:
    """Create a file of zeros without holes.

    On a full disk, setting a bit in a hole would make the kernel end the process with SIGBUS.
    """
    with create(path, buffering=0) as file:
        overwrite_in_place(file)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
            else:
                return
        rest = size
        while rest:
            rest -= file.write(_ZEROS[: min(rest, len(_ZEROS))])


def _no_room(path: Path, size: int, error: OSError) -> str:
    text = f"{path} cannot be created: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        text += (
            f"; the file takes {size:,} bytes: free some space, set JOBDIR to a directory on a "
            "larger disk, or lower BLOOM_EXPECTED_REQUESTS"
        )
    return text
