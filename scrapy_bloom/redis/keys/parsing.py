"""Reading the hash of a filter in Redis. Anybody may have written it: it is checked, or refused."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from scrapy_bloom.exceptions import WITH_COUNTERS, StorageError
from scrapy_bloom.filters.hashing import HASH_SCHEME, SALT_BYTES
from scrapy_bloom.filters.sizing import COUNTER_BITS, Geometry
from scrapy_bloom.generations.plausible import check_asked, check_generation, check_time
from scrapy_bloom.generations.policy import Generation
from scrapy_bloom.redis.keys.meta import (
    FIGURE_TYPES,
    FORMAT_VERSION,
    GEOMETRY_TYPES,
    QUEUE,
    RESET,
    FilterInfo,
    RedisGeneration,
    Stored,
)

_MOST = 1 << 63  # integers are below it
_SHOWN = 60  # characters of what is wrong
_LONGEST = 1 << 16  # bytes of a field; ours have a few hundred
_MOST_CHUNKS = 1 << 24  # 16 TiB, more than the largest filter takes

_ID = re.compile(r"[0-9a-f]{8}")
_FIELD = re.compile(
    rf"filter|{RESET}|{QUEUE}|draft:(?P<draft>{_ID.pattern})"
    rf"|(?P<epoch>{_ID.pattern}):(?P<number>[1-9][0-9]{{0,9}})(?P<count>:count)?"
)
_SALT = re.compile(rf"[0-9a-f]{{{2 * SALT_BYTES}}}")
_COUNT = re.compile(rb"[0-9]{1,18}")
_HALF_OF_A_PAIR = re.compile(r"[\ud800-\udfff]")

_INFO_TYPES = {each.name: each.type for each in fields(FilterInfo)}
_DEFAULTS = {each.name: each.default for each in fields(FilterInfo) if each.default is not MISSING}
_GENERATION_TYPES = {"id": str, **GEOMETRY_TYPES, **FIGURE_TYPES}
_DRAFT_TYPES = {"chunks": int, "since": float}


def parsed(raw: Mapping[bytes, bytes]) -> Stored:
    """Return what all fields of a hash say.

    Raises:
        StorageError: the filter is of a newer format, or has counters.
        ValueError: this is no filter of ours, or a damaged one; it says what is wrong.
    """
    texts: dict[str, bytes] = {}
    for raw_name, value in raw.items():
        if max(len(raw_name), len(value)) > _LONGEST:
            raise ValueError(f"its field {_shown(raw_name)} is far too long")
        texts[raw_name.decode("utf-8", "backslashreplace")] = value
    with _in_field("filter"):
        info = _info(texts["filter"]) if "filter" in texts else None
    generations: list[RedisGeneration] = []
    left_over: list[RedisGeneration] = []
    drafts = {}
    for name, value in texts.items():
        match = _FIELD.fullmatch(name)
        if match is None:
            raise ValueError(f"its field {_shown(name)} is none of a filter's")
        with _in_field(name):
            if match["draft"]:
                drafts[match["draft"]] = _draft(value)
            elif match["epoch"] and not match["count"]:
                count = texts.get(f"{name}:count", b"0")
                new = _generation(value, match["epoch"], int(match["number"]), count)
                is_live = info is not None and info.epoch == new.epoch
                (generations if is_live else left_over).append(new)
    ids = [each.id for each in [*generations, *left_over]]
    if len(set(ids)) < len(ids):
        raise ValueError("two of its generations have the same id")
    generations.sort(key=lambda each: each.number)
    return Stored(info, generations, left_over, drafts, was_reset=RESET in texts)


@contextlib.contextmanager
def _in_field(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"its field {_shown(name)}: {error}") from None


def _info(value: bytes) -> FilterInfo:
    raw = _members(value)
    version = raw.get("format")
    if type(version) is int and FORMAT_VERSION < version < _MOST:
        raise StorageError(
            f"the filter has format version {version}, and this scrapy_bloom knows versions up to "
            f"{FORMAT_VERSION}; upgrade scrapy_bloom to use it"
        )
    if unknown := raw.keys() - _INFO_TYPES.keys():
        raise ValueError(f"{_shown(min(unknown))} is none of its members")
    info = FilterInfo(**_of_types({**_DEFAULTS, **raw}, _INFO_TYPES))
    if info.format != FORMAT_VERSION or info.hash_scheme != HASH_SCHEME:
        raise ValueError(f"format {info.format}, hash scheme {info.hash_scheme}, which is unknown")
    if not _SALT.fullmatch(info.salt) or not _ID.fullmatch(info.epoch):
        raise ValueError("salt or epoch is not hexadecimal, or of another length")
    check_time("created_at", info.created_at)
    check_asked(info.error_rate)
    return info


def _generation(value: bytes, epoch: str, number: int, count: bytes) -> RedisGeneration:
    raw = _of_types(_members(value), _GENERATION_TYPES)
    if not _ID.fullmatch(raw["id"]):
        raise ValueError("id is not hexadecimal, or of another length")
    if raw["counter_bits"] == COUNTER_BITS:
        raise StorageError(f"the filter {WITH_COUNTERS}")
    if raw["counter_bits"] != 1:
        raise ValueError(f"counter_bits is {raw['counter_bits']}")
    if not _COUNT.fullmatch(count):
        raise ValueError(f"its count is {_shown(count)}")
    figures: dict[str, Any] = {
        "number": number,
        "geometry": Geometry(raw["num_blocks"], raw["num_hashes"]),
        "count": int(count),
        **{name: raw[name] for name in FIGURE_TYPES},
    }
    check_generation(Generation(**figures))  # one in Redis lays out commands of so many hashes
    return RedisGeneration(id=raw["id"], epoch=epoch, **figures)


def _draft(value: bytes) -> tuple[int, float]:
    raw = _json(value)
    if not isinstance(raw, list) or len(raw) != len(_DRAFT_TYPES):
        raise ValueError("it is not a number of keys and a time")
    draft = _of_types(dict(zip(_DRAFT_TYPES, raw, strict=True)), _DRAFT_TYPES)
    if not 0 <= draft["chunks"] <= _MOST_CHUNKS:
        raise ValueError(f"its number of keys is {draft['chunks']}")
    check_time("its time", draft["since"])
    return draft["chunks"], draft["since"]


def _members(value: bytes) -> dict[str, Any]:
    raw = _json(value)
    if isinstance(raw, dict):
        return raw
    raise ValueError("it is no JSON object")


def _json(value: bytes) -> Any:
    try:
        return json.loads(value.decode())
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON") from None


def _of_types(raw: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that are known, each of its type; a float may be written as an int."""
    members = {}
    for name, kind in types.items():
        value: Any = raw.get(name)
        if kind is float and type(value) is int and abs(value) < _MOST:
            value = float(value)
        if type(value) is not kind or (kind is int and abs(value) >= _MOST):
            raise ValueError(f"{name} is {_shown(value)}")
        if kind is str and _HALF_OF_A_PAIR.search(value):
            raise ValueError(f"{name} holds half of a surrogate pair")
        members[name] = value
    return members


def _shown(value: object) -> str:
    """Return what a value is, in one line that is not too long."""
    if isinstance(value, int) and abs(value) >= _MOST:
        return "a number beyond 2 ** 63"
    text = ascii(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
