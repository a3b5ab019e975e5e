"""The Lua scripts of the package, which a server runs as one step each.

`scrapy_bloom/redis/lua` has one file for each script, one for each table of functions that scripts
share, and `head`, with which each script begins. The first line of a script names its tables, each
after those that it uses itself: `-- Uses: queue, bloom`. Arguments and replies are maps in msgpack.
"""

import functools
import re
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import RefusedError

_USES = re.compile(r"-- Uses: (.*)\n")


@functools.cache
def script(name: str) -> str:
    """Return the text of a script, with the head and the tables that it uses before it."""
    uses = _USES.match(_text(name))
    tables = uses[1].split(", ") if uses else []
    texts = (f"local {table} = (function()\n{_text(table)}end)()\n" for table in tables)
    return "".join([_text("head"), *texts, _text(name)])


def _text(name: str) -> str:
    return (Path(__file__).parent / "lua" / f"{name}.lua").read_text(encoding="utf-8")


def packed(values: Any) -> bytes:
    """Return the argument of a script, which finds nil in the place of None."""
    import msgpack  # noqa: PLC0415 - only a crawl with Redis needs it

    # Lua has texts of bytes only.
    return bytes(msgpack.packb(values, use_bin_type=False, unicode_errors="surrogatepass"))


def unpacked(data: bytes) -> Any:
    """Return the values that a script has packed, with texts as bytes; or raise an Exception."""
    import msgpack  # noqa: PLC0415

    return msgpack.unpackb(data, raw=True, strict_map_key=False)


def reply_of(data: Any) -> dict[str, Any]:
    """Return the reply of a script; raise a RefusedError if it is none."""
    try:
        return {name.decode(): value for name, value in unpacked(data).items()}
    except Exception as error:
        raise RefusedError(
            f"a script has returned {str(data)[:60]!a}: check that BLOOM_REDIS_URL is the address "
            "of Redis or Valkey itself"
        ) from error
