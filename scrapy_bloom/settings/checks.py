"""Check and convert the values of settings; an invalid value raises a SettingError of one line."""

import os
import re
from collections.abc import Callable
from typing import Any

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.filters.hashing import SALT_BYTES
from scrapy_bloom.filters.sizing import MAX_CAPACITY, MIN_ERROR_RATE
from scrapy_bloom.redis.connection.client import looks_like_url, without_secrets
from scrapy_bloom.text import is_control, masked, parsed_number, parsed_seconds

_MAX_SECONDS = 10**9
_PLACEHOLDERS = re.compile(r"%%|%\(spider\)s")

Check = Callable[[str, Any], Any]  # takes name and value, returns the converted value, or raises


def _number(
    kind: type[int | float],
    allowed: str,
    is_allowed: Callable[[float], bool],
    read: Callable[[str], float] = parsed_number,
) -> Check:
    def check(name: str, value: Any) -> int | float:
        number = read(value) if isinstance(value, str) else value
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not is_allowed(number):
            raise _error(name, value, allowed)
        return kind(number)

    return check


whole_number = _number(
    int,
    f"a whole number from 1 to {MAX_CAPACITY:,}, for example 1_000_000 or 5M",
    lambda number: 1 <= number <= MAX_CAPACITY and number == int(number),
)
whole_number_or_0 = _number(
    int,
    f"a whole number from 0 (no limit) to {MAX_CAPACITY:,}",
    lambda number: 0 <= number <= MAX_CAPACITY and number == int(number),
)
shards = _number(
    int, "a whole number from 1 to 64", lambda number: 1 <= number <= 64 and number == int(number)
)
rate = _number(
    float,
    f"a number between 0 and 1 (at least {MIN_ERROR_RATE}), for example 1e-9",
    lambda number: MIN_ERROR_RATE <= number < 1,
)
seconds = _number(
    float,
    f'a number of seconds from 0 to {_MAX_SECONDS:,}, or a text such as "90s", "12h" or "7d"; 0 '
    "turns it off",
    lambda number: 0 <= number <= _MAX_SECONDS,
    parsed_seconds,
)

lease_seconds = _number(
    float,
    'a number of seconds from 1 to 86,400, or a text such as "90s" or "10m"',
    lambda number: 1 <= number <= 86_400,
    parsed_seconds,
)


def _text(allowed: str, is_allowed: Callable[[str], object]) -> Check:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or not is_allowed(value):
            raise _error(name, value, allowed)
        return value

    return check


def choice(*choices: str) -> Check:
    """Return a check that a value is one of the choices."""
    return _text("one of " + ", ".join(f'"{name}"' for name in choices), choices.__contains__)


service = _text(
    "the name of the service that a Sentinel watches",
    lambda name: name and not looks_like_url(name),
)


def directory(name: str, value: Any) -> str:
    """Check the path of a directory."""
    allowed = 'the path of a directory; "%(spider)s" in it becomes the spider\'s name'
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str) or not path or "\0" in path:
        raise _error(name, value, allowed)
    if looks_like_url(path):  # which may contain a password
        raise SettingError(
            f"{name} is a URL (it is not logged); allowed is {allowed}. For a filter in Redis, "
            'set BLOOM_BACKEND = "redis" and BLOOM_REDIS_URL'
        )
    try:
        os.fsencode(_template(name, path, allowed))
    except UnicodeEncodeError:  # a lone surrogate, which no file system accepts
        raise _error(name, value, allowed) from None
    return path


def file_name(spider: str) -> str:
    """Return a spider's name as one part of a path, with unsafe characters percent-encoded.

    >>> file_name("shop 2"), file_name("../x"), file_name("..")
    ('shop 2', '..%2Fx', '%2E%2E')
    """
    unsafe = set("./" if not spider.strip(".") else "/" + '\\:*?"<>|' * (os.name == "nt"))
    return "".join(
        "".join(f"%{byte:02X}" for byte in char.encode(errors="surrogatepass"))
        if char in unsafe or is_control(char)
        else char
        for char in spider
    )


def redis_key(name: str, value: Any) -> str:
    """Check the name of the keys in Redis."""
    allowed = 'a name without braces; "%(spider)s" in it becomes the spider\'s name'
    if not isinstance(value, str) or not value or set("{}") & set(value) or looks_like_url(value):
        # Braces are hash tags: they would put all keys on one node of a Cluster.
        raise _error(name, value, allowed)
    return _template(name, value, allowed)


def _template(name: str, value: str, allowed: str) -> str:
    """Check that a template has no placeholder but the spider's name."""
    # Formatting it as a test would be unsafe: "%(spider)999999999s" takes a gigabyte.
    if "%" in _PLACEHOLDERS.sub("", value):
        raise _error(name, value, allowed + ', and any other "%" must be written "%%"')
    return value


def flag(name: str, value: Any) -> bool:
    """Check a boolean, which the command line gives as a text."""
    text = str(value).lower() if isinstance(value, (bool, int, str)) else ""
    if text not in {"true", "1", "false", "0"}:
        raise _error(name, value, "True or False")
    return text in {"true", "1"}


def statuses(name: str, value: Any) -> frozenset[int]:
    """Check a list of HTTP statuses."""
    if isinstance(value, str):
        value = [text for text in value.split(",") if text.strip()]
    if isinstance(value, (list, tuple, set, frozenset)):
        statuses = {int(status) if isinstance(status, str) else status for status in value}
        if all(type(status) is int and 100 <= status <= 999 for status in statuses):
            return frozenset(statuses)
    allowed = 'a list of HTTP statuses, for example [404, 410], or a text such as "404,410"'
    raise _error(name, value, allowed)


def redis_url(name: str, value: Any) -> str:
    """Check the URL of a Redis server; the name may list several settings that form it."""
    try:
        without_secrets(value if isinstance(value, str) else "")
    except ValueError as error:
        # The value may contain a password.
        raise SettingError(
            f"{name} is not valid (its value is not logged): allowed is {error}"
        ) from None
    return str(value)


def salt(name: str, value: Any) -> bytes:
    """Check a salt; the error never shows its value."""
    try:
        salt = bytes.fromhex(value)
    except (TypeError, ValueError):
        salt = b""
    if len(salt) != SALT_BYTES:
        # The value is a secret: an attacker who knows it can craft colliding URLs.
        raise SettingError(
            f"{name} is not valid (its value is not logged): allowed are "
            f"{2 * SALT_BYTES} hexadecimal digits, as from secrets.token_hex({SALT_BYTES})"
        )
    return salt


def _error(name: str, value: Any, allowed: str) -> SettingError:
    if isinstance(value, str) and looks_like_url(value):
        return SettingError(f"{name} is a URL (it is not logged); allowed is {allowed}")
    return SettingError(f"{name} is {shown(value)}; allowed is {allowed}")


def shown(value: Any) -> str:
    """Return a value as errors show it: on one line, in at most 100 characters."""
    try:
        text = masked(repr(value))
    except Exception:  # noqa: BLE001 - the repr of an object in a setting may raise anything
        text = f"an object of type {type(value).__name__}"
    text = text if len(text) <= 100 else text[:97] + "..."
    # A repr() may contain line breaks and control characters.
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
