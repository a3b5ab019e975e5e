"""The machine and the versions; memory of this process; fresh processes to measure in."""

import multiprocessing
import platform
from collections.abc import Callable
from importlib.metadata import version
from typing import TypeVar

import psutil  # type: ignore[import-untyped]

T = TypeVar("T")

PACKAGES = ("scrapy", "twisted", "bitarray", "mmh3", "redis", "hiredis", "scrapy-bloom")


def facts() -> dict[str, str]:
    """What a reader must know of the machine to compare figures."""
    import pyperf  # type: ignore[import-untyped]  # noqa: PLC0415 - not in each fresh process

    metadata = pyperf.Run([1.0], collect_metadata=True).get_metadata()
    return {
        "CPU": f"{metadata.get('cpu_model_name', platform.machine())}, "
        f"{metadata.get('cpu_count', 'unknown')} cores",
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
    } | {name: version(name) for name in PACKAGES}


def resident_bytes() -> int:
    """Memory of this process now (RSS): its own, and the pages of mapped files it has touched."""
    return int(psutil.Process().memory_info().rss)


def in_fresh_process(timeout_secs: float, function: Callable[..., T], *args: object) -> T:
    """Call a module's function in a new interpreter, which is ended after the time limit.

    Raises:
        multiprocessing.TimeoutError: it took longer, or the process died.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(timeout_secs)
