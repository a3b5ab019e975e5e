"""Run the benchmarks, all or by name, and write docs/benchmarks.md and docs/benchmarks-jobs.md.

Their results are kept, and the pages are made of all that are; so a run of some of them renews
their sections only. A run with --quick prints its figures and keeps nothing.
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
    "site": "real_site",
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
    "latency": "latency",
}
# Those on the page of jobs; all others are on the first one.
OF_JOBS = (
    "crashes",
    "restarts",
    "scheduler",
    "workers",
    "workers-peer",
    "scripts",
    "latency",
)


def main() -> None:
    options = _options()
    are_kept = not options.quick and options.output is None
    shown = []
    for name in [] if options.page else [each for each in BENCHMARKS if each in options.names]:
        print(f"{name} ...\n", flush=True)
        result = _run(name, quick=options.quick)
        print(report.section_text(result.section), flush=True)
        if are_kept:
            results.save(result)
        shown.append(result)
    if are_kept or options.page:
        shown = results.load(BENCHMARKS)
    page: Path | None = options.output or (PAGE if are_kept else None)
    if page is not None:
        _write_pages(page, shown, of_all=are_kept or options.page)


def _write_pages(first: Path, shown: Sequence[Result], *, of_all: bool) -> None:
    """The page of jobs is beside the first one, and links to it."""
    jobs = first.with_stem(f"{first.stem}-jobs")
    pages = {
        first: (
            "Benchmarks",
            f"Jobs, kills and queues have [their own page]({jobs.name}).",
            [name for name in BENCHMARKS if name not in OF_JOBS],
        ),
        jobs: (
            "Benchmarks of jobs, kills and queues",
            f"All other benchmarks are on [the first page]({first.name}).",
            OF_JOBS,
        ),
    }
    for page, (title, other, names) in pages.items():
        here = [result for result in shown if result.name in names]
        missing = sorted(set(names) - {result.name for result in here}) if of_all else []
        if here:
            glance = summary.text({result.name: result.section for result in shown})
            results.write_page(
                page,
                here,
                title=title,
                about=other,
                summary=glance if of_all and page == first else (),
                missing=missing,
            )
            print(f"written to {page}")


def _run(name: str, *, quick: bool) -> Result:
    from benchmarks.shared import machine  # noqa: PLC0415 - see BENCHMARKS

    module, _, function = BENCHMARKS[name].partition(":")
    run: Callable[[bool], Section] = getattr(
        import_module(f"benchmarks.{module}"), function or "run"
    )
    section = run(quick)
    return Result(
        name=name,
        date=dt.datetime.now(dt.timezone.utc).date().isoformat(),
        command=f"python -m benchmarks {name}{' --quick' if quick else ''}",
        quick=quick,
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
    parser.add_argument(
        "--output",
        type=Path,
        metavar="PAGE",
        help="write the first page there, that of jobs beside it, and keep no results",
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    if options.names and options.page:
        parser.error("--page is of all that was measured, without a NAME")
    options.names = options.names or list(BENCHMARKS)
    return options


if __name__ == "__main__":
    main()
