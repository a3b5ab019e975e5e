"""Read and check the BLOOM_* settings of a crawl; an error of a value is one line."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from typing import Any
from urllib.parse import quote

from scrapy.settings import BaseSettings
from scrapy.utils.misc import load_object

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.filters.sizing import MAX_CAPACITY, MIN_ERROR_RATE
from scrapy_bloom.generations.policy import Policy
from scrapy_bloom.redis.server import RedisServer
from scrapy_bloom.redis.url import ServerURL, looks_like_url
from scrapy_bloom.text import SECONDS, TIMES, is_control, masked, parsed_number

PREFIX = "BLOOM_"
_LONGEST_RUN = 100
_PLACEHOLDERS = re.compile(r"%%|%\(spider\)s")

# Takes a value, and returns it converted; None if it is not allowed.
_Check = Callable[[Any], Any]


def _number(
    lowest: float,
    highest: float,
    kind: type[int | float] = float,
    units: Mapping[str, int] = TIMES,
) -> _Check:
    def check(value: Any) -> int | float | None:
        number = parsed_number(value, units) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            return None
        return kind(number) if lowest <= number <= highest and kind(number) == number else None

    return check


def _redis_key(value: Any) -> str | None:
    if not isinstance(value, str) or not value or set("{}") & set(value) or looks_like_url(value):
        return None  # braces are hash tags: they would put all keys on one node of a Cluster
    # Formatting it as a test would be unsafe: "%(spider)999999999s" takes a gigabyte.
    return None if "%" in _PLACEHOLDERS.sub("", value) else value


def _flag(value: Any) -> bool | None:
    text = str(value).lower() if isinstance(value, (bool, int, str)) else ""
    return {"true": True, "1": True, "false": False, "0": False}.get(text)


def checked_url(name: str, value: Any) -> str:
    """Check the URL of a server; the name may list several settings that form it."""
    try:
        ServerURL.parsed(value if isinstance(value, str) else "")
    except ValueError as error:
        # The value may contain a password.
        raise SettingError(f"{name} is not valid (its value is not logged): use {error}") from None
    return str(value)


def _run_name(value: Any) -> str | None:
    is_text = isinstance(value, str) and len(value) <= _LONGEST_RUN and not looks_like_url(value)
    return None if not is_text or any(map(is_control, value)) else str(value)


def _shown(value: Any) -> str:
    """Return a value as errors show it: on one line, in at most 100 characters, without secrets."""
    try:
        is_url = isinstance(value, str) and looks_like_url(value)
        text = "a URL (it is not logged)" if is_url else masked(repr(value))
    except Exception:  # noqa: BLE001 - the repr of an object in a setting may raise anything
        text = f"an object of type {type(value).__name__}"
    text = text if len(text) <= 100 else text[:97] + "..."
    # A repr() may contain line breaks and control characters.
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _setting(default: Any, check: _Check, allowed: str = "", *, is_secret: bool = False) -> Any:
    metadata = {"check": check, "allowed": allowed}
    return field(default=default, repr=not is_secret, metadata=metadata)


_FROM_0 = 'from 0 to 1,000,000,000, or a text such as "90s", "12h" or "7d"; 0 turns it off'
_SECONDS = _number(0, 10**9, units=SECONDS), f"a number of seconds {_FROM_0}"
_FLAG = _flag, "True or False"


@dataclass(frozen=True)
class BloomSettings:
    """The settings of one crawl, checked: those of docs/settings.md without the prefix BLOOM_.

    Attributes:
        redis_url: URL of the server of the filter, from BLOOM_REDIS_URL or from the settings of
            scrapy-redis; None: the filter is in the JOBDIR or in memory.
        redis_params: options of redis-py for that URL, from REDIS_PARAMS of scrapy-redis.
        is_crash_safe: whether the scheduler is CrashSafeScheduler.
        is_endless: whether the workers wait for requests, so that runs may never end.
    """

    expected_requests: int = _setting(
        1_000_000,
        _number(1, MAX_CAPACITY, int),
        f"a whole number from 1 to {MAX_CAPACITY:,}, for example 1_000_000 or 5M",
    )
    error_rate: float = _setting(
        1e-9,
        _number(MIN_ERROR_RATE, math.nextafter(1, 0)),
        f"a number between 0 and 1 (at least {MIN_ERROR_RATE}), for example 1e-9",
    )
    window_secs: float = _setting(0.0, *_SECONDS)
    keep_failed: bool = _setting(True, *_FLAG)
    run: str = _setting(
        "",
        _run_name,
        f"a text of at most {_LONGEST_RUN} characters on one line, for example a date",
    )
    redis_url: str | None = _setting(None, partial(checked_url, "BLOOM_REDIS_URL"), is_secret=True)
    redis_params: Mapping[str, Any] = field(default_factory=dict, repr=False)
    redis_key: str = _setting(
        "%(spider)s:bloom",
        _redis_key,
        'a name without braces; "%(spider)s" in it becomes the spider\'s name, and any other "%" '
        'must be written "%%"',
    )
    redis_deadline_secs: float = _setting(30.0, *_SECONDS)
    redis_mirror: bool = _setting(True, *_FLAG)
    is_crash_safe: bool = False
    is_endless: bool = False
    queue_lease_secs: float = _setting(
        60.0,
        _number(1, 86_400, units=SECONDS),
        'a number of seconds from 1 to 86,400, or a text such as "90s" or "10m"',
    )
    shared_limits: bool = _setting(True, *_FLAG)
    queue_when_empty: str = _setting(
        "close", {"close": "close", "wait": "wait"}.get, 'one of "close", "wait"'
    )

    @classmethod
    def from_settings(
        cls, settings: BaseSettings, *, scrapy_redis: bool = False
    ) -> "BloomSettings":
        """Read and check the BLOOM_* settings of a crawler; the command line gives strings.

        Without a BLOOM_REDIS_URL, the filter may be on the server of scrapy-redis's settings.
        Raises a SettingError that says what is allowed.
        """
        values: dict[str, Any] = {}
        for name in sorted(str(key) for key in settings):
            if name.startswith(PREFIX):
                values[name.removeprefix(PREFIX).lower()] = _checked(name, settings[name])
        scheduler = load_object(settings["SCHEDULER"]) if settings["SCHEDULER"] else None
        values["is_crash_safe"] = getattr(scheduler, "is_crash_safe", False)
        if scrapy_redis and values.get("redis_url") is None:
            values["redis_url"], values["redis_params"] = scrapy_redis_url(settings)
        values["is_endless"] = scrapy_redis or values.get("queue_when_empty") == "wait"
        new = cls(**values)
        if new.queue_when_empty == "wait" and not new.shares_queue:
            raise SettingError(
                'BLOOM_QUEUE_WHEN_EMPTY is "wait", but only the workers of a shared queue can wait '
                "for requests; set BLOOM_REDIS_URL and SCHEDULER = "
                '"scrapy_bloom.CrashSafeScheduler", or remove BLOOM_QUEUE_WHEN_EMPTY'
            )
        if new.run and not new.is_crash_safe:
            raise SettingError(
                f"BLOOM_RUN is {_shown(new.run)}, but under this scheduler each process is a run; "
                'set SCHEDULER = "scrapy_bloom.CrashSafeScheduler", or remove BLOOM_RUN'
            )
        return new

    @property
    def is_in_redis(self) -> bool:
        """Whether the filter is in Redis."""
        return self.redis_url is not None

    @property
    def shares_queue(self) -> bool:
        """Whether CrashSafeScheduler keeps its queue in Redis, next to the filter."""
        return self.is_crash_safe and self.is_in_redis

    @property
    def policy(self) -> Policy:
        """Size, growth and expiry of the filter."""
        return Policy(
            expected=self.expected_requests,
            error_rate=self.error_rate,
            window=self.window_secs,
            is_endless=self.is_endless,
        )

    def redis_server(self) -> RedisServer:
        """Return a connection to the server of the filter, not opened yet."""
        assert self.redis_url is not None
        deadline_secs = self.redis_deadline_secs
        return RedisServer(self.redis_url, params=self.redis_params, deadline_secs=deadline_secs)


_SETTINGS = {
    PREFIX + setting.name.upper(): setting
    for setting in fields(BloomSettings)
    if "check" in setting.metadata
}


def _checked(name: str, value: Any) -> Any:
    if (setting := _SETTINGS.get(name)) is None:
        close = get_close_matches(name, _SETTINGS, n=1, cutoff=0.8)
        hint = f"did you mean {close[0]}?" if close else "known are " + ", ".join(_SETTINGS)
        raise SettingError(f"{name} is not a setting of scrapy_bloom; {hint}")
    try:
        # An empty text is the only way to write None on the command line.
        if setting.default is None and (value is None or (isinstance(value, str) and not value)):
            return None
        checked = setting.metadata["check"](value)
    except SettingError:
        raise
    except Exception:  # noqa: BLE001 - the object in a setting may raise anything
        checked = None
    if checked is None:
        allowed = setting.metadata["allowed"]
        raise SettingError(f"{name} is {_shown(value)}; set it to {allowed}") from None
    return checked


def scrapy_redis_url(settings: BaseSettings) -> tuple[str, Mapping[str, Any]]:
    """Return the URL of scrapy-redis's server, and the options of redis-py; raise SettingError."""
    try:
        params = dict(settings.getdict("REDIS_PARAMS"))
    except (TypeError, ValueError):
        raise SettingError("REDIS_PARAMS is not valid; use a dict") from None
    for name in ("url", "host", "port", "db"):
        if value := settings.get(f"REDIS_{name.upper()}"):
            params[name] = value
    if url := params.pop("url", None):
        return checked_url("REDIS_URL", url), params
    host, port = str(params.pop("host", "localhost")), params.pop("port", 6379)
    if path := params.pop("unix_socket_path", None):
        url = f"unix://{quote(str(path))}"
    else:
        scheme = "rediss" if params.pop("ssl", False) else "redis"
        host = f"[{host}]" if ":" in host else host  # IPv6
        url = f"{scheme}://{host}:{port}/{params.pop('db', 0)}"
    return checked_url("REDIS_HOST, REDIS_PORT, REDIS_DB or REDIS_PARAMS", url), params
