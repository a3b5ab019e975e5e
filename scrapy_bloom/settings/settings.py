"""Read and check the BLOOM_* settings of a crawl."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from scrapy.settings import BaseSettings
from scrapy.utils.misc import load_object

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.generations.policy import Policy
from scrapy_bloom.redis.connection.client import with_login_of
from scrapy_bloom.settings import checks

if TYPE_CHECKING:
    from scrapy_bloom.redis.connection.server import RedisServer

logger = logging.getLogger(__name__)

PREFIX = "BLOOM_"


def _setting(default: Any, check: checks.Check, *, is_secret: bool = False) -> Any:
    return field(default=default, repr=not is_secret, metadata={"check": check})


@dataclass(frozen=True)
class BloomSettings:
    """The settings of one crawl, checked.

    Each other attribute holds the setting of the same name with the prefix BLOOM_, as described in
    docs/settings.md.

    Attributes:
        redis_url: URL of the server of a "redis" backend, from BLOOM_REDIS_URL or from the settings
            of scrapy-redis.
        redis_params: options of redis-py for that URL, from REDIS_PARAMS of scrapy-redis.
        shares_queue: whether CrashSafeScheduler keeps its queue in Redis, next to the filter.
    """

    expected_requests: int = _setting(1_000_000, checks.whole_number)
    error_rate: float = _setting(1e-9, checks.rate)
    backend: str = _setting("local", checks.choice("local", "redis"))
    dir: str | None = _setting(None, checks.directory)
    on_full: str = _setting("grow", checks.choice("grow", "warn", "close"))
    window_secs: float = _setting(0.0, checks.seconds)
    forget_failed: bool = _setting(False, checks.flag)
    done_statuses: frozenset[int] = _setting(frozenset({404, 410}), checks.statuses)
    record_on: str = _setting("scheduled", checks.choice("scheduled", "crawled"))
    on_unclean_shutdown: str = _setting("auto", checks.choice("auto", "keep", "reset", "stop"))
    sync_secs: float = _setting(30.0, checks.seconds)
    salt: bytes | None = _setting(None, checks.salt, is_secret=True)
    redis_url: str | None = _setting(None, checks.redis_url, is_secret=True)
    redis_params: Mapping[str, Any] = field(default_factory=dict, repr=False)
    redis_cluster: bool = _setting(False, checks.flag)
    redis_sentinel: str | None = _setting(None, checks.service)
    redis_key: str = _setting("%(spider)s:bloom", checks.redis_key)
    redis_shards: int = _setting(1, checks.shards)
    redis_deadline_secs: float = _setting(30.0, checks.seconds)
    redis_on_outage: str = _setting("close", checks.choice("close", "pass"))
    redis_mirror: bool = _setting(True, checks.flag)
    redis_flush: bool = _setting(False, checks.flag)
    shares_queue: bool = False
    queue_lease_secs: float = _setting(60.0, checks.lease_seconds)
    shared_limits: bool = _setting(True, checks.flag)
    queue_when_empty: str = _setting("close", checks.choice("close", "wait"))
    max_pages_per_slot: int = _setting(0, checks.whole_number_or_0)

    @classmethod
    def from_settings(cls, settings: BaseSettings) -> "BloomSettings":
        """Read and check the BLOOM_* settings of a crawler; the command line gives strings.

        Raises:
            SettingError: a value is not valid, two settings do not fit together, or there is no
                setting with the name. The message says what is allowed.
        """
        values: dict[str, Any] = {}
        for name in sorted(str(key) for key in settings):
            if name.startswith(PREFIX):
                values[name.removeprefix(PREFIX).lower()] = _checked(name, settings[name])
        if values.get("backend") == "redis":
            if values.get("redis_url") is None:
                values["redis_url"], values["redis_params"] = scrapy_redis_url(settings)
            if scheduler := settings["SCHEDULER"]:
                scheduler = load_object(scheduler)
                values["shares_queue"] = getattr(scheduler, "is_crash_safe", False)
        new = cls(**values)
        scheduler = load_object(settings["SCHEDULER"]) if settings["SCHEDULER"] else None
        if new.max_pages_per_slot and not getattr(scheduler, "is_crash_safe", False):
            raise SettingError(
                f"BLOOM_MAX_PAGES_PER_SLOT is {new.max_pages_per_slot}, and only the queue of "
                "CrashSafeScheduler counts the requests of a host; set SCHEDULER = "
                '"scrapy_bloom.CrashSafeScheduler", or remove BLOOM_MAX_PAGES_PER_SLOT'
            )
        new._check_together(settings.get("JOBDIR"))
        return new

    def warn_of_unused(self, extra: Mapping[str, Any]) -> None:
        """Log a warning about settings for Redis that have no effect on a filter in files."""
        unused = [
            name
            for name, setting in _SETTINGS.items()
            if name.startswith("BLOOM_REDIS_") and getattr(self, setting.name) != setting.default
        ]
        if self.backend == "local" and unused:
            logger.warning(
                '%s: no effect, because BLOOM_BACKEND is "local", and the filter is in files or in '
                'memory; to share it in Redis, set BLOOM_BACKEND = "redis"',
                ", ".join(unused),
                extra=extra,
            )

    def _check_together(self, job_dir: Any) -> None:
        if self.shares_queue and self.redis_on_outage == "pass":
            raise SettingError(
                'BLOOM_REDIS_ON_OUTAGE is "pass", but CrashSafeScheduler keeps its queue in Redis, '
                'too, so that there is nothing to crawl without the server; set it to "close"'
            )
        if self.redis_shards > 1 and self.backend == "redis" and not self.shares_queue:
            raise SettingError(
                f"BLOOM_REDIS_SHARDS is {self.redis_shards}, but only a filter with the queue of "
                "CrashSafeScheduler can have several shards; set SCHEDULER = "
                '"scrapy_bloom.CrashSafeScheduler", or remove BLOOM_REDIS_SHARDS'
            )
        if self.queue_when_empty == "wait" and not self.shares_queue:
            raise SettingError(
                'BLOOM_QUEUE_WHEN_EMPTY is "wait", but only the workers of a shared queue can wait '
                'for requests; set BLOOM_BACKEND = "redis" and SCHEDULER = '
                '"scrapy_bloom.CrashSafeScheduler", or remove BLOOM_QUEUE_WHEN_EMPTY'
            )
        if self.max_pages_per_slot and self.redis_shards > 1:
            raise SettingError(
                f"BLOOM_MAX_PAGES_PER_SLOT is {self.max_pages_per_slot}, and BLOOM_REDIS_SHARDS is "
                f"{self.redis_shards}: no shard knows how many requests of a host the others "
                "have; remove one of these settings"
            )
        if self.record_on != "crawled":
            return
        what = 'BLOOM_RECORD_ON is "crawled", '
        if self.backend != "local":
            raise SettingError(
                f'{what}but BLOOM_BACKEND is "{self.backend}": crawlers that share a filter have '
                "to record requests when they schedule them, or several would crawl the same "
                'page; set BLOOM_RECORD_ON = "scheduled"'
            )
        if job_dir:
            raise SettingError(
                f"{what}but there is a JOBDIR ({job_dir}): the filter does not have the requests "
                "in a paused job's queue yet, so the resumed run would crawl them again where it "
                "finds a link to them; remove JOBDIR (runs that share a BLOOM_DIR do not need it), "
                'or set BLOOM_RECORD_ON = "scheduled"'
            )
        if self.dir is None:
            raise SettingError(
                f"{what}but there is no BLOOM_DIR, so later runs would not have the filter; set "
                "BLOOM_DIR to a directory that the runs share"
            )

    @property
    def policy(self) -> Policy:
        """Size, growth and expiry of the filter."""
        return Policy(
            expected=self.expected_requests,
            error_rate=self.error_rate,
            on_full=self.on_full,
            window=self.window_secs,
        )

    def redis_server(self) -> "RedisServer":
        """Return a connection to the server of the filter, not opened yet."""
        from scrapy_bloom.redis.connection.server import RedisServer  # noqa: PLC0415 - imports redis

        assert self.redis_url is not None
        return RedisServer(
            self.redis_url,
            params=self.redis_params,
            cluster=self.redis_cluster,
            sentinel=self.redis_sentinel,
            deadline_secs=self.redis_deadline_secs,
        )

    @property
    def outlives_the_run(self) -> bool:
        """Whether later crawls use the same filter, even with another queue."""
        if self.backend == "redis":
            return not self.redis_flush
        return self.dir is not None

    def directory(self, job_dir: str | None, spider: str) -> Path | None:
        """Return the directory of the filter's files: BLOOM_DIR, or `bloom` in the job directory.

        Returns:
            An absolute path, so that a spider may change the working directory. None if there is
            neither directory, so that the filter stays in memory.

        Raises:
            SettingError: BLOOM_DIR begins with "~name", and there is no such user.
        """
        if self.dir is not None:
            path = Path(self.dir % {"spider": checks.file_name(spider)})
            if not self.dir.startswith("~"):  # the spider's name may begin with "~"
                return path.absolute()
            try:
                return path.expanduser().absolute()
            except RuntimeError:
                raise SettingError(
                    f"BLOOM_DIR is {checks.shown(self.dir)}, but there is no such home directory; "
                    'allowed is the path of a directory: write "./~..." if its name begins with "~"'
                ) from None
        return Path(job_dir, "bloom").absolute() if job_dir else None


_SETTINGS = {
    PREFIX + setting.name.upper(): setting
    for setting in fields(BloomSettings)
    if "check" in setting.metadata
}


def _checked(name: str, value: Any) -> Any:
    setting = _SETTINGS.get(name)
    if setting is None:
        raise SettingError(_unknown(name))
    try:
        # An empty text is the only way to write None on the command line.
        if setting.default is None and (value is None or (isinstance(value, str) and not value)):
            return None
        return setting.metadata["check"](name, value)
    except SettingError:
        raise
    except Exception as error:  # noqa: BLE001 - the object in a setting may raise anything
        # Without the value, which may be a secret.
        raise SettingError(
            f"{name} is of type {type(value).__name__} and cannot be read "
            f"({type(error).__name__}); allowed is a plain value"
        ) from None


def _unknown(name: str) -> str:
    import difflib  # noqa: PLC0415 - only a typo needs it

    close = difflib.get_close_matches(name, _SETTINGS, n=1, cutoff=0.8)
    hint = f"did you mean {close[0]}?" if close else "known are " + ", ".join(_SETTINGS)
    return f"{name} is not a setting of scrapy_bloom; {hint}"


def scrapy_redis_url(settings: BaseSettings) -> tuple[str, Mapping[str, Any]]:
    """Return the URL of scrapy-redis's server, and the options of redis-py for it.

    The function reads REDIS_URL, REDIS_HOST, REDIS_PORT, REDIS_DB and REDIS_PARAMS. Raises a
    SettingError if a value is not valid.
    """
    params = _params(settings)
    for name in ("url", "host", "port", "db"):
        if value := settings.get(f"REDIS_{name.upper()}"):
            params[name] = value
    if url := params.pop("url", None):
        return checks.redis_url("REDIS_URL", url), params
    host, port = str(params.pop("host", "localhost")), params.pop("port", 6379)
    if path := params.pop("unix_socket_path", None):
        url = f"unix://{quote(str(path))}"
    else:
        scheme = "rediss" if params.pop("ssl", False) else "redis"
        host = f"[{host}]" if ":" in host else host  # IPv6
        url = f"{scheme}://{host}:{port}/{params.pop('db', 0)}"
    return checks.redis_url("REDIS_HOST, REDIS_PORT, REDIS_DB or REDIS_PARAMS", url), params


def url_with_login(url: str, settings: BaseSettings) -> tuple[str, Mapping[str, Any]]:
    """Return the URL of a command with the login from the settings for the same server.

    The second value has the options of redis-py from REDIS_PARAMS that do not name a server. They
    apply to any server, unless BLOOM_REDIS_URL is set. Raises a SettingError if REDIS_PARAMS is not
    valid.
    """
    own = settings.get("BLOOM_REDIS_URL")
    params = {} if own else _params(settings)
    for name in ("url", "host", "port", "db", "unix_socket_path", "ssl"):
        params.pop(name, None)
    with suppress(ValueError):  # a URL in the settings that is not valid has no login to add
        url = with_login_of(url, own or scrapy_redis_url(settings)[0])
    return url, params


def _params(settings: BaseSettings) -> dict[str, Any]:
    try:
        return dict(settings.getdict("REDIS_PARAMS"))
    except (TypeError, ValueError):
        raise SettingError("REDIS_PARAMS is not valid; allowed is a dict") from None
