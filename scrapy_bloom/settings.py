"""The BLOOM_* settings: read, checked and explained in one place."""

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

from scrapy.settings import BaseSettings

from scrapy_bloom import amounts
from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.hashing import SALT_BYTES
from scrapy_bloom.redis_url import without_secrets
from scrapy_bloom.sizing import MAX_CAPACITY, MIN_ERROR_RATE

logger = logging.getLogger(__name__)

PREFIX = "BLOOM_"
_MAX_SECONDS = 10**9
_PLACEHOLDERS = re.compile(r"%%|%\(spider\)s")


def _whole_number(name: str, value: Any) -> int:
    allowed = f"a whole number from 1 to {MAX_CAPACITY:,}, for example 1_000_000 or 5M"
    number = _as_number(name, value, allowed)
    if number != int(number) or not 1 <= number <= MAX_CAPACITY:
        raise _error(name, value, allowed)
    return int(number)


def _rate(name: str, value: Any) -> float:
    allowed = f"a number between 0 and 1 (at least {MIN_ERROR_RATE}), for example 1e-9"
    number = _as_number(name, value, allowed)
    if not MIN_ERROR_RATE <= number < 1:
        raise _error(name, value, allowed)
    return float(number)


def _seconds(name: str, value: Any) -> float:
    allowed = (
        f'a number of seconds from 0 to {_MAX_SECONDS:,}, or a text such as "90s", "12h" or '
        '"7d"; 0 switches it off'
    )
    number = _as_number(name, value, allowed, amounts.seconds)
    if not 0 <= number <= _MAX_SECONDS:
        raise _error(name, value, allowed)
    return float(number)


def _choice(*choices: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _error(name, value, "one of " + ", ".join(f'"{choice}"' for choice in choices))
        return value

    return check


def _directory(name: str, value: Any) -> str | None:
    allowed = 'the path of a directory; "%(spider)s" in it becomes the spider\'s name'
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)):
        raise _error(name, value, allowed)
    path = os.fspath(value)
    if not isinstance(path, str) or not path or "\0" in path:
        raise _error(name, value, allowed)
    if "://" in path:  # of a server, perhaps with a password
        raise SettingError(
            f"{name} is a URL (it is kept out of the log); allowed is {allowed}. For a filter in "
            'Redis, set BLOOM_BACKEND = "redis" and BLOOM_REDIS_URL'
        )
    _check_template(name, path, allowed)
    try:
        os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate: no file system takes it
        raise _error(name, value, allowed) from None
    return path


def _check_template(name: str, value: str, allowed: str) -> None:
    """That nothing but the spider's name is to be put in."""
    if "%" in _PLACEHOLDERS.sub("", value):  # not tried out: "%(spider)999999999s" takes a gigabyte
        raise _error(name, value, allowed + ', and any other "%" must be written "%%"')


def _flag(name: str, value: Any) -> bool:
    text = str(value).lower() if isinstance(value, (bool, int, str)) else ""
    if text in {"true", "1", "false", "0"}:
        return text in {"true", "1"}
    raise _error(name, value, "True or False")


def _statuses(name: str, value: Any) -> frozenset[int]:
    allowed = 'a list of HTTP statuses, for example [404, 410], or a text such as "404,410"'
    if isinstance(value, str):
        value = [each for each in value.split(",") if each.strip()]
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _error(name, value, allowed)
    statuses = {int(each) if isinstance(each, str) else each for each in value}
    if not all(type(each) is int and 100 <= each <= 999 for each in statuses):
        raise _error(name, value, allowed)
    return frozenset(statuses)


def _redis_url(name: str, value: Any) -> str | None:
    if value is None:
        return None
    try:
        without_secrets(value if isinstance(value, str) else "")
    except ValueError as error:
        # It may hold a password.
        raise SettingError(
            f"{name} is not valid (its value is kept out of the log): allowed is {error}"
        ) from None
    return str(value)


def _redis_key(name: str, value: Any) -> str:
    allowed = 'a name without braces; "%(spider)s" in it becomes the spider\'s name'
    if not isinstance(value, str) or not value or "{" in value or "}" in value:
        # Braces would put all keys on one node of a Cluster.
        raise _error(name, value, allowed)
    _check_template(name, value, allowed)
    return value


def _service(name: str, value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise _error(name, value, "the name of the service that a Sentinel watches")


def _salt(name: str, value: Any) -> bytes | None:
    if value is None:
        return None
    try:
        salt = bytes.fromhex(value)
    except (TypeError, ValueError):
        salt = b""
    if len(salt) != SALT_BYTES:
        # The value is a secret: whoever knows it can craft colliding URLs.
        raise SettingError(
            f"{name} is not valid (its value is kept out of the log): allowed are "
            f"{2 * SALT_BYTES} hexadecimal digits, as from secrets.token_hex({SALT_BYTES})"
        )
    return salt


@dataclass(frozen=True)
class BloomSettings:
    """The settings of one crawl, checked.

    Each attribute is the setting of that name with the prefix BLOOM_: see docs/settings.md.

    Attributes:
        redis_url: of a "redis" backend, the URL that counts: BLOOM_REDIS_URL or scrapy-redis's.
        redis_params: options of redis-py beside that URL, from scrapy-redis's REDIS_PARAMS.
    """

    expected_requests: int = 1_000_000
    error_rate: float = 1e-9
    backend: str = "local"
    dir: str | None = None
    on_full: str = "grow"
    window_secs: float = 0.0
    forget_failed: bool = False
    done_statuses: frozenset[int] = frozenset({404, 410})
    record_on: str = "scheduled"
    on_unclean_shutdown: str = "auto"
    sync_secs: float = 30.0
    salt: bytes | None = field(default=None, repr=False)
    redis_url: str | None = field(default=None, repr=False)
    redis_params: Mapping[str, Any] = field(default_factory=dict, repr=False)
    redis_cluster: bool = False
    redis_sentinel: str | None = None
    redis_key: str = "%(spider)s:bloom"
    redis_deadline_secs: float = 30.0
    redis_on_outage: str = "close"
    redis_mirror: bool = True
    redis_flush: bool = False

    @classmethod
    def from_settings(cls, settings: BaseSettings) -> "BloomSettings":
        """Read and check the BLOOM_* settings of a crawler.

        Args:
            settings: Scrapy's settings; values from the command line come as strings.

        Raises:
            SettingError: (a ValueError) names the setting, the value and what is allowed. A name
                that does not exist is an error too: a typo must not pass for a default; and so are
                settings that do not go together.
        """
        values: dict[str, Any] = {}
        for name in sorted(str(key) for key in settings):
            if name.startswith(PREFIX):
                values[name.removeprefix(PREFIX).lower()] = _checked(name, settings[name])
        if values.get("backend") == "redis":
            url, params = _redis_place(settings, values.get("redis_url"))
            values.update(redis_url=url, redis_params=params)
        new = cls(**values)
        new._check_together(settings.get("JOBDIR"))
        return new

    def warn_of_unused(self, extra: Mapping[str, Any]) -> None:
        """Tell of settings that count for Redis only, where the filter is not there.

        Args:
            extra: for the log record.
        """
        unused = [
            PREFIX + each.name.upper()
            for each in fields(self)
            if each.name.startswith("redis_")
            and each.name != "redis_params"
            and getattr(self, each.name) != each.default
        ]
        if self.backend == "local" and unused:
            logger.warning(
                '%s: set, but without any effect, since BLOOM_BACKEND is "local", and the filter '
                'in a file or in memory; to share it in Redis, set BLOOM_BACKEND = "redis"',
                ", ".join(unused),
                extra=extra,
            )

    def _check_together(self, job_dir: Any) -> None:
        if self.record_on != "crawled":
            return
        what = 'BLOOM_RECORD_ON is "crawled", '
        if self.backend != "local":
            raise SettingError(
                f'{what}and BLOOM_BACKEND is "{self.backend}": crawlers that share a filter have '
                "to record what they schedule, or they would crawl the same pages; set it to "
                '"scheduled"'
            )
        if job_dir:
            raise SettingError(
                f"{what}and there is a JOBDIR ({job_dir}): the requests in a paused job's queue "
                "are not recorded yet, so that the resumed run would not know them, and crawl them "
                "again wherever it finds a link; remove JOBDIR (runs that share a BLOOM_DIR go on "
                'without one), or set BLOOM_RECORD_ON = "scheduled"'
            )
        if self.dir is None:
            raise SettingError(
                f"{what}and there is no BLOOM_DIR: nothing would be kept for later runs; set "
                "BLOOM_DIR to a directory that they share"
            )

    def directory(self, job_dir: str | None, spider: str) -> Path | None:
        """Where the filter's files go.

        Args:
            job_dir: Scrapy's job directory, if the crawl has one.
            spider: the spider's name.

        Returns:
            BLOOM_DIR, else `bloom` in the job directory, else None: the filter stays in memory.
            Absolute, so that a spider may change the working directory.

        Raises:
            SettingError: BLOOM_DIR begins with "~name", and there is no such user.
        """
        if self.dir is not None:
            path = self.dir % {"spider": spider}
            try:
                return Path(path).expanduser().absolute()
            except RuntimeError:
                raise SettingError(
                    f"BLOOM_DIR is {_shown(path)}, and there is no such home directory; allowed is "
                    'the path of a directory: write "./~..." for one whose name begins with "~"'
                ) from None
        return Path(job_dir, "bloom").absolute() if job_dir else None


def _redis_place(settings: BaseSettings, own: str | None) -> tuple[str, Mapping[str, Any]]:
    """The URL of the Redis server, and options of redis-py for what it does not say.

    That is BLOOM_REDIS_URL alone, or else what scrapy-redis uses: REDIS_URL, REDIS_HOST,
    REDIS_PORT, REDIS_DB and REDIS_PARAMS.
    """
    if own is not None:
        return own, {}
    params = _redis_params(settings)
    for name in ("url", "host", "port", "db"):
        if value := settings.get(f"REDIS_{name.upper()}"):
            params[name] = value
    if url := params.pop("url", None):
        return _redis_url("REDIS_URL", url) or "", params
    host, port = str(params.pop("host", "localhost")), params.pop("port", 6379)
    if path := params.pop("unix_socket_path", None):
        url = f"unix://{quote(str(path))}"
    else:
        scheme = "rediss" if params.pop("ssl", False) else "redis"
        host = f"[{host}]" if ":" in host else host  # IPv6
        url = f"{scheme}://{host}:{port}/{params.pop('db', 0)}"
    return _redis_url("REDIS_HOST, REDIS_PORT, REDIS_DB or REDIS_PARAMS", url) or "", params


def address_of_queue(settings: BaseSettings) -> str:
    """Return the URL of scrapy-redis's server, without secrets.

    Raises:
        SettingError: it is not valid.
    """
    url, _ = _redis_place(settings, None)
    return without_secrets(url)


def redis_params(settings: BaseSettings) -> Mapping[str, Any]:
    """The options of redis-py in REDIS_PARAMS, without those that say which server it is.

    Raises:
        SettingError: it is no dict.
    """
    place = {"url", "host", "port", "db", "unix_socket_path", "ssl"}
    return {name: value for name, value in _redis_params(settings).items() if name not in place}


def _redis_params(settings: BaseSettings) -> dict[str, Any]:
    try:
        return dict(settings.getdict("REDIS_PARAMS"))
    except (TypeError, ValueError):
        raise SettingError("REDIS_PARAMS is not valid; allowed is a dict") from None


_MAY_BE_NONE = {
    PREFIX + each.name.upper() for each in fields(BloomSettings) if each.default is None
}
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "BLOOM_EXPECTED_REQUESTS": _whole_number,
    "BLOOM_ERROR_RATE": _rate,
    "BLOOM_BACKEND": _choice("local", "redis"),
    "BLOOM_DIR": _directory,
    "BLOOM_ON_FULL": _choice("grow", "warn", "close"),
    "BLOOM_WINDOW_SECS": _seconds,
    "BLOOM_FORGET_FAILED": _flag,
    "BLOOM_DONE_STATUSES": _statuses,
    "BLOOM_RECORD_ON": _choice("scheduled", "crawled"),
    "BLOOM_ON_UNCLEAN_SHUTDOWN": _choice("auto", "keep", "reset", "stop"),
    "BLOOM_SYNC_SECS": _seconds,
    "BLOOM_SALT": _salt,
    "BLOOM_REDIS_URL": _redis_url,
    "BLOOM_REDIS_CLUSTER": _flag,
    "BLOOM_REDIS_SENTINEL": _service,
    "BLOOM_REDIS_KEY": _redis_key,
    "BLOOM_REDIS_DEADLINE_SECS": _seconds,
    "BLOOM_REDIS_ON_OUTAGE": _choice("close", "pass"),
    "BLOOM_REDIS_MIRROR": _flag,
    "BLOOM_REDIS_FLUSH": _flag,
}
if {PREFIX + each.name.upper() for each in fields(BloomSettings)} - {"BLOOM_REDIS_PARAMS"} != set(
    _CHECKS
):
    raise AssertionError("every field of BloomSettings needs its check, and the other way round")


def _checked(name: str, value: Any) -> Any:
    if name == "BLOOM_COUNTING":
        raise SettingError(
            "BLOOM_COUNTING is gone: filters have no counters any more, and BLOOM_FORGET_FAILED = "
            "True alone is enough to forget what failed; remove BLOOM_COUNTING"
        )
    check = _CHECKS.get(name)
    if check is None:
        raise SettingError(_unknown(name))
    try:
        if name in _MAY_BE_NONE and isinstance(value, str) and not value:
            return None  # the command line can't say it otherwise
        return check(name, value)
    except SettingError:
        raise
    except Exception as error:  # noqa: BLE001 - any object can be in a setting, also a broken one
        # Without the value: it may be a secret.
        raise SettingError(
            f"{name} is of type {type(value).__name__} and cannot be read "
            f"({type(error).__name__}); allowed is a plain value, as docs/settings.md says"
        ) from None


def _as_number(
    name: str, value: Any, allowed: str, read: Callable[[str], float] = amounts.number
) -> int | float:
    number = read(value) if isinstance(value, str) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise _error(name, value, allowed)
    if isinstance(number, float) and not math.isfinite(number):
        raise _error(name, value, allowed)
    return number


def _error(name: str, value: Any, allowed: str) -> SettingError:
    return SettingError(f"{name} is {_shown(value)}; allowed is {allowed}")


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - any object can be in a setting, also one with a broken repr
        text = f"an object of type {type(value).__name__}"
    text = text if len(text) <= 100 else text[:97] + "..."
    # One line, whatever a repr() of somebody's own looks like.
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _unknown(name: str) -> str:
    import difflib  # noqa: PLC0415 - for a typo, and not in every crawl

    close = difflib.get_close_matches(name, _CHECKS, n=1, cutoff=0.8)
    hint = f"did you mean {close[0]}?" if close else "known are " + ", ".join(_CHECKS)
    return f"{name} is not a setting of scrapy_bloom; {hint}"
