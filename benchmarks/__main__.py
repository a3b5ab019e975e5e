"""Run the benchmarks, all or by name, and write docs/benchmarks.md.

A run of some of them, or with --quick, only prints its figures, so that it cannot take the place
of the complete page by mistake; --output writes them all the same.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks import (
    counting,
    crashes,
    growth,
    importing,
    large,
    machine,
    memory,
    opening,
    redis_backend,
    report,
    request,
    scheduler,
    space,
)
from benchmarks.report import Section

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

BENCHMARKS: dict[str, Callable[[bool], Section]] = {
    "request": request.run,
    "open": opening.run,
    "memory": memory.run,
    "large": large.run,
    "space": space.run,
    "counting": counting.run,
    "growth": growth.run,
    "redis": redis_backend.run,
    "import": importing.run,
    "crashes": crashes.run,
    "scheduler": scheduler.run,
}


def main() -> None:
    options = _options()
    names = [name for name in BENCHMARKS if name in options.names] or list(BENCHMARKS)
    sections = []
    for name in names:
        print(f"{name} ...\n", flush=True)
        sections.append(BENCHMARKS[name](options.quick))
        print(report.section_text(sections[-1]), flush=True)
    complete = len(names) == len(BENCHMARKS) and not options.quick
    output: Path | None = options.output or (PAGE if complete else None)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        command = "python -m benchmarks" + "".join(f" {name}" for name in options.names)
        command += " --quick" if options.quick else ""
        page = report.page_text(sections, machine.facts(), command, quick=options.quick)
        output.write_text(page, encoding="utf-8")
        print(f"written to {output}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--output", type=Path, help="the page to write; default docs/benchmarks.md")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    return options


if __name__ == "__main__":
    main()
