"""A filter so large that a bit's number in it no longer fits into 32 bits."""

import shutil
import tempfile
from pathlib import Path
from time import perf_counter

from bitarray import bitarray

from benchmarks.shared import samples
from benchmarks.shared.report import Section, Table, all_of
from scrapy_bloom.files.backend import LocalBackend
from scrapy_bloom.filters.hashing import SALT_BYTES, block_of, make_hasher
from scrapy_bloom.filters.sizing import BLOCK_BITS, BLOCK_BYTES, Geometry
from scrapy_bloom.generations.policy import Origin, Policy
from scrapy_bloom.job.paths import file_name

CAPACITY = 1_000_000_000
LAST_BLOCKS = 16
FREE_BYTES = 5 * 10**9
TITLE = "Offsets past 2**32 bits"
SALT = bytes(range(SALT_BYTES))


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    candidates = 500_000 if quick else 6_000_000
    with tempfile.TemporaryDirectory() as directory:
        if (free := shutil.disk_usage(directory).free) < FREE_BYTES:
            return Section(TITLE, f"Skipped: only {free / 1e9:.1f} GB free for temporary files.")
        return _measured(Path(directory), candidates)


def _measured(directory: Path, candidates: int) -> Section:
    backend, creating = _opened(directory)
    geometry = backend.status().generations[0].geometry
    found = _in_last_blocks(geometry, candidates)
    added, others = found[::2], found[1::2]
    new = sum(map(backend.add, added))
    backend.close()
    backend, opening = _opened(directory)
    seen = sum(fingerprint in backend for fingerprint in added)
    not_seen = sum(fingerprint not in backend for fingerprint in others)
    backend.close()
    expected = _offsets(geometry, added)
    right = len(expected) if expected == _set_bits(directory / file_name(1), geometry) else 0
    return Section(
        title=TITLE,
        method=(
            f"A filter for {CAPACITY:,} requests at error rate 1e-6: {geometry.num_bits:,} bits, "
            f"{geometry.nbytes / 1e9:.2f} GB. Of {candidates:,} fingerprints, those that belong "
            f"into the last {LAST_BLOCKS} blocks are taken; every other one is added, and the "
            "filter closed and opened again. Then the last blocks are read from the file without "
            "the filter's code, and compared bit for bit with where the hashes belong."
        ),
        checks=[
            all_of("added there as new", new, len(added)),
            all_of("found after closing and opening", seen, len(added)),
            all_of("never added, not found", not_seen, len(others)),
            all_of("bits at their place in the file", right, len(expected)),
        ],
        tables=[
            Table(
                ("figure", ""),
                [
                    ("first bit of the last blocks", f"{_first_bit(geometry):,}"),
                    ("creating the filter, ms", f"{1000 * creating:,.1f}"),
                    ("opening it again, ms", f"{1000 * opening:,.1f}"),
                ],
            )
        ],
        notes="Creating reserves the space on the disk; how long that takes, the disk decides.",
    )


def _opened(directory: Path) -> tuple[LocalBackend, float]:
    begun = perf_counter()
    backend = LocalBackend(directory, Policy(expected=CAPACITY, error_rate=1e-6), Origin(salt=SALT))
    backend.open()
    backend.begin()
    return backend, perf_counter() - begun


def _in_last_blocks(geometry: Geometry, candidates: int) -> list[bytes]:
    locate = make_hasher(SALT, geometry.num_hashes)
    first = geometry.num_blocks - LAST_BLOCKS
    return [
        fp
        for fp in samples.fingerprints(0, candidates)
        if block_of(locate(fp)[0], geometry.num_blocks) >= first
    ]


def _offsets(geometry: Geometry, fingerprints: list[bytes]) -> set[int]:
    """The numbers of the bits that these fingerprints set, from the hash alone."""
    located = map(make_hasher(SALT, geometry.num_hashes), fingerprints)
    return {
        block_of(block_hash, geometry.num_blocks) * BLOCK_BITS + position
        for block_hash, positions in located
        for position in positions
    }


def _set_bits(path: Path, geometry: Geometry) -> set[int]:
    """The numbers of the bits that are set in the last blocks of the file."""
    length = LAST_BLOCKS * BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(-length, 2)
        bits = bitarray(endian="big")
        bits.frombytes(file.read(length))
    return {_first_bit(geometry) + number for number in bits.search(1)}


def _first_bit(geometry: Geometry) -> int:
    return (geometry.num_blocks - LAST_BLOCKS) * BLOCK_BITS
