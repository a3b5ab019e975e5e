"""The Lua scripts of the package, which a server runs as one step each.

`scrapy_bloom/redis/lua` has one file for each script, and one for each table of functions that
scripts share. The first line of a file names the tables that it uses: `-- Uses: rows, bloom`.
"""

import functools
import re
from importlib import resources
from typing import Any

from scrapy_bloom.exceptions import RefusedError

_USES = re.compile(r"-- Uses: (.*)\n")


@functools.cache
def script(name: str) -> str:
    """Return the text of a script, with the tables that it uses before it."""
    tables = dict.fromkeys(_tables(name))
    heads = (f"local {table} = (function()\n{_text(table)}end)()\n" for table in tables)
    return "".join([*heads, _text(name)])


def _tables(name: str) -> list[str]:
    """Return the names of the tables that a file uses, each after those that it uses itself."""
    uses = _USES.match(_text(name))
    direct = uses[1].split(", ") if uses else []
    return [shared for table in direct for shared in [*_tables(table), table]]


def _text(name: str) -> str:
    return (resources.files(__package__) / "lua" / f"{name}.lua").read_text(encoding="utf-8")


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
