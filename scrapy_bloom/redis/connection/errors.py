"""Classify errors of a Redis server: whether to try again, and what to advise."""

import re

from scrapy_bloom.redis.connection.client import import_redis
from scrapy_bloom.text import escaped

# Replies of a server that is temporarily unable: it starts, saves, fails over, or is full. In a
# script, Redis 6 puts other words before such a reply.
_PASSING = ("LOADING", "MISCONF", "NOREPLICAS", "MASTERDOWN", "BUSY ", "READONLY", "OOM ")
_IN_PIPELINE = "of pipeline caused error: "  # redis-py puts the whole command before this
_IN_SCRIPT = re.compile(r"^ACL failure in script: |\.? script: (\S+, )?on @\S+$")

_NO_LOGIN = ("Authentication", "Authorization", "NOAUTH")
# Advice for errors whose class or text contains one of the words.
_HINTS = {
    ("MasterNotFound",): (
        "if the Sentinels have a password of their own, set it in REDIS_PARAMS (sentinel_kwargs), "
        "and set REDIS_URL instead of BLOOM_REDIS_URL"
    ),
    _NO_LOGIN: (
        "check user and password in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS; for a command, "
        "its URL or REDISCLI_AUTH)"
    ),
    ("NoPermission", "NOPERM", "no permissions"): (
        "the user needs ~KEY and ~{KEY}* (KEY: BLOOM_REDIS_KEY) and, in this order, +@connection "
        "+@transaction +@string +@bitmap +@hash +@sortedset -@dangerous +info +time +exists "
        "+expire +persist +rename +unlink +eval +evalsha, for a Cluster +cluster|slots"
    ),
    ("WRONGTYPE",): "something else has that key: set BLOOM_REDIS_KEY to another name",
    ("SENTINEL", "unknown command"): (
        "BLOOM_REDIS_SENTINEL is for the URL of a Sentinel, and only for one"
    ),
    ("cluster", "MovedError", "AskError", "CrossSlotError"): (
        "BLOOM_REDIS_CLUSTER = True is for a Cluster, and only for one"
    ),
    ("CERTIFICATE",): "check the host in BLOOM_REDIS_URL, and its option ssl_ca_certs",
    ("Protocol error",): "what answers there is no Redis: check BLOOM_REDIS_URL",
    ("keyword argument",): "check the options in BLOOM_REDIS_URL (or REDIS_URL, REDIS_PARAMS)",
}


def hint(error: Exception) -> str:
    """Return advice about a refusal, to be appended to its text; empty if there is none."""
    text = f"{type(error).__name__}: {short_text(error)}"
    hints = [hint for words, hint in _HINTS.items() if any(word in text for word in words)]
    return "".join(f"; {each}" for each in hints[:1])


def reason(error: Exception) -> Exception:
    """Return the error of the node that an error of a Cluster's client wraps."""
    redis = import_redis()
    inner = error.__cause__ or error.__context__
    if isinstance(error, redis.exceptions.RedisClusterException) and isinstance(
        inner, (redis.RedisError, redis.exceptions.RedisClusterException, TypeError)
    ):
        return reason(inner)
    return error


def is_passing(error: Exception) -> bool:
    """Return whether the same command is likely to succeed a little later."""
    error = reason(error)
    about = f"{type(error).__name__} {error}"
    if any(word in about for word in (*_NO_LOGIN, "CERTIFICATE")):
        return False
    errors = import_redis().exceptions
    passing = (
        errors.ConnectionError,
        errors.TimeoutError,
        errors.ClusterError,
        errors.RedisClusterException,
        errors.TryAgainError,
        errors.WatchError,
        errors.ReadOnlyError,
        errors.OutOfMemoryError,
        OSError,
    )
    if isinstance(error, passing):
        return True
    if not isinstance(error, errors.ResponseError):
        return False
    text = short_text(error)
    # The slot of a script moves to another node, which does not have all keys yet.
    is_moving = "access a non local key" in text
    return is_moving or text.startswith(_PASSING) or any(f": -{word}" in text for word in _PASSING)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a server refused a write because its memory is full."""
    name = type(reason(error)).__name__
    return name == "OutOfMemoryError" or "OOM command not allowed" in str(error)


def short_text(error: Exception) -> str:
    """Return the text of an error in one line, without the command."""
    _, _, text = " ".join(str(error).split()).rpartition(_IN_PIPELINE)
    text, _, _ = text.partition(" : <")  # details of each Sentinel
    text, _, _ = text.partition(", with args beginning with")  # which may be a password
    text = _IN_SCRIPT.sub("", text)  # name and line of the script
    text = escaped(text).rstrip(".") or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
