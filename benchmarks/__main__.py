"""Run the benchmarks, all or by name, and write docs/benchmarks.md and its neighbours.

Their results are kept, and the pages are made of all that are; so a run of some of them renews
their sections only. A run with --quick, --rounds or --only prints its figures and keeps nothing.
"""

import argparse
import datetime as dt
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.shared import report, results, summary
from benchmarks.shared.report import Section
from benchmarks.shared.results import Result

PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

# The modules, in the order of the pages. Each has a function `run`, or that behind the colon. It is
# only imported if it is used: the pages can be written without what they need.
BENCHMARKS = {
    "request": "request",
    "crawl": "crawl",
    "crawl-memory": "crawl_memory",
    "errors": "peer_errors",
    "open": "opening",
    "memory": "memory",
    "bitmap": "bitmap",
    "redis": "redis_backend",
    "import": "importing",
    "crashes": "crashes",
    "restarts": "restarts",
    "scheduler": "scheduler",
    "workers": "worker_kills",
    "workers-peer": "worker_kills:run_peer",
    "scripts": "script_times",
    "server": "one_server",
    "latency": "latency",
}
# The pages beside the first one, each with its title, and what is on it.
PAGES = {
    "jobs": (
        "Benchmarks of jobs and kills",
        ("crashes", "restarts", "scheduler", "workers", "workers-peer"),
    ),
    "server": ("Benchmarks with a server", ("redis", "scripts", "server", "latency")),
}


def main() -> None:
    options = _options()
    for name in [] if options.page else options.names:
        print(f"{name} ...\n", flush=True)
        result = _run(name, options)
        print(report.section_text(result.section), flush=True)
        if not options.is_trial:
            results.save(result)
    if not options.is_trial:
        _write_pages(options.output, results.load(BENCHMARKS))


def _write_pages(first: Path, kept: Sequence[Result]) -> None:
    """The others are beside the first one, and linked with it."""
    paths = {name: first.with_stem(f"{first.stem}-{name}") for name in PAGES}
    elsewhere = {name for _, names in PAGES.values() for name in names}
    jobs, server = (path.name for path in paths.values())
    results.write_page(
        first,
        [result for result in kept if result.name not in elsewhere],
        title="Benchmarks",
        about=f"Other pages: [jobs and kills]({jobs}), [with a server]({server}).",
        summary=summary.text({result.name: result.section for result in kept}),
    )
    for name, (title, names) in PAGES.items():
        results.write_page(
            paths[name],
            [result for result in kept if result.name in names],
            title=title,
            about=f"All pages are listed on [the first one]({first.name}).",
        )
    print(f"written to {first} and {', '.join(map(str, paths.values()))}")


def _run(name: str, options: argparse.Namespace) -> Result:
    from benchmarks.shared import machine  # noqa: PLC0415 - see BENCHMARKS

    module, _, function = BENCHMARKS[name].partition(":")
    run: Callable[..., Section] = getattr(import_module(f"benchmarks.{module}"), function or "run")
    section = run(options.quick, **options.of_crawl)
    return Result(
        name=name,
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        command=f"python -m benchmarks {name}{' --quick' if options.quick else ''}",
        quick=options.quick,
        facts=machine.facts(),
        section=section,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; default: all"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    mode.add_argument("--page", action="store_true", help="only write the pages again")
    parser.add_argument("--rounds", type=int, metavar="N", help="of `crawl`: how many")
    parser.add_argument("--only", metavar="TEXT", help="of `crawl`: crawls with TEXT in their name")
    parser.add_argument(
        "--output",
        type=Path,
        default=PAGE,
        metavar="PAGE",
        help="write the first page there, and the others beside it",
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    if options.names and options.page:
        parser.error("--page is of all that was measured, without a NAME")
    options.of_crawl = {
        option: value
        for option in ("rounds", "only")
        if (value := getattr(options, option)) is not None
    }
    if options.of_crawl and options.names != ["crawl"]:
        parser.error("--rounds and --only are options of `crawl` alone")
    options.is_trial = options.quick or bool(options.of_crawl)
    options.names = [name for name in BENCHMARKS if name in options.names or not options.names]
    return options


if __name__ == "__main__":
    main()
