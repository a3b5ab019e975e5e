"""The settings of scrapy-redis that say which Redis server it uses."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from scrapy.settings import BaseSettings

from scrapy_bloom.exceptions import SettingError
from scrapy_bloom.redis.connection.url import with_login_of, without_secrets


def checked_url(name: str, value: Any) -> str:
    """Return the URL of a Redis server that a setting (or several) holds; raises SettingError."""
    try:
        without_secrets(value if isinstance(value, str) else "")
    except ValueError as error:
        # It may hold a password.
        raise SettingError(
            f"{name} is not valid (its value is kept out of the log): allowed is {error}"
        ) from None
    return str(value)


def url_of_queue(settings: BaseSettings) -> tuple[str, Mapping[str, Any]]:
    """Return the URL of scrapy-redis's server, and options of redis-py for what it does not say.

    They are made of REDIS_URL, REDIS_HOST, REDIS_PORT, REDIS_DB and REDIS_PARAMS. Raises a
    SettingError if these are not valid.
    """
    params = _params(settings)
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


def completed(url: str, settings: BaseSettings) -> tuple[str, Mapping[str, Any]]:
    """Return a command's URL with the login that the settings have for the same server.

    Without a BLOOM_REDIS_URL, REDIS_PARAMS counts for any server: the second is redis-py's options
    in it that do not name a server. Raises a SettingError if it is not valid.
    """
    own = settings.get("BLOOM_REDIS_URL")
    params = {} if own else _params(settings)
    for name in ("url", "host", "port", "db", "unix_socket_path", "ssl"):
        params.pop(name, None)
    with suppress(ValueError):  # settings that are not valid, and do not count here
        url = with_login_of(url, own or url_of_queue(settings)[0])
    return url, params


def _params(settings: BaseSettings) -> dict[str, Any]:
    try:
        return dict(settings.getdict("REDIS_PARAMS"))
    except (TypeError, ValueError):
        raise SettingError("REDIS_PARAMS is not valid; allowed is a dict") from None
