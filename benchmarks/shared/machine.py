"""The machine and the versions; memory of this process, time, fresh processes to measure in."""

import gc
import multiprocessing
import os
import platform
import re
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

PACKAGES = ("scrapy", "twisted", "bitarray", "mmh3", "redis", "hiredis", "scrapy-bloom")


def facts() -> dict[str, str]:
    """What a reader must know of the machine to compare figures."""
    processor = re.search(r"^model name\s+: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "CPU": f"{processor[1] if processor else platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{nbytes / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
    } | {name: version(name) for name in PACKAGES}


def status_bytes(name: str) -> int:
    """Memory of this process as Linux has it.

    The highest is VmHWM; ru_maxrss is at least that of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def resident_bytes() -> int:
    """Memory of this process now (RSS): its own, and the pages of mapped files it has touched."""
    return status_bytes("VmRSS")


def in_fresh_process(timeout_secs: float, function: Callable[..., Any], *args: object) -> Any:
    """Call a module's function in a new interpreter, which is ended after the time limit.

    Raises:
        multiprocessing.TimeoutError: it took longer, or the process died.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply_async(function, args).get(timeout_secs)


def timed(call: Callable[[Any], Any], given: Iterable[Any]) -> tuple[float, int]:
    """Call a function with each of some values, without garbage collection in between.

    Returns:
        Seconds for all of them, and for how many it returned True.
    """
    answers = 0
    gc.collect()
    gc.disable()
    try:
        begun = perf_counter()
        for entry in given:
            answers += call(entry)
        return perf_counter() - begun, answers
    finally:
        gc.enable()
