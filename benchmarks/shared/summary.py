"""The first screen of docs/benchmarks.md: three pictures, and the ten figures a user asks for."""

from collections.abc import Mapping, Sequence

from benchmarks.shared.report import Section, Table, table_text

PICTURES = (
    ("pictures/memory.svg", "Memory of the filter and of Scrapy's set, by the number of requests"),
    ("benchmarks/crawl-memory.png", "Memory of a crawl of 200,000 pages"),
    ("benchmarks/growth-time.png", "Time to record a fingerprint, by the number recorded"),
)
# What a user asks, the benchmark, its check that answers, and how its figure reads.
FIGURES = (
    (
        "Memory for 10 million requests at 1e-6",
        "memory",
        "times less memory than RFPDupeFilter, n = 10,000,000",
        "{} times less than RFPDupeFilter",
    ),
    (
        "False-positive rate with 10 times the expected requests",
        "errors",
        "ours at 10 times the capacity, relative to 0.001",
        "{} of the configured rate",
    ),
    (
        "Time to filter a new request with a plain URL",
        "request",
        "plain URL, new, time relative to Scrapy's",
        "{} of RFPDupeFilter's",
    ),
    (
        "The same with another fingerprinter than Scrapy's",
        "request",
        "other fingerprinter, new, time relative to Scrapy's",
        "{} of RFPDupeFilter's",
    ),
    (
        "Processor time of a whole crawl of Python's documentation",
        "crawl",
        "python3-doc, follow_all: CPU, relative",
        "{} of RFPDupeFilter's",
    ),
    (
        "Opening the filter of a paused job of 10 million requests",
        "open",
        "times faster than RFPDupeFilter",
        "{} times faster than RFPDupeFilter",
    ),
    (
        "Jobs killed at random in which every page is crawled",
        "crashes",
        "of 60 jobs killed at random, with every page crawled",
        "{}",
    ),
    (
        "Shared crawls with a kill in which every page is crawled",
        "workers",
        "crawls with a kill at random in which every page is crawled, with its item",
        "{}",
    ),
    (
        "Speed of a worker whose server is 1 ms away",
        "latency",
        "pages/s over Scrapy in memory, 1 ms away",
        "{} of Scrapy's with its queue in memory",
    ),
    (
        "The same, compared with scrapy-redis",
        "latency",
        "pages/s over scrapy-redis, 1 ms away",
        "{} times scrapy-redis's",
    ),
)


def text(sections: Mapping[str, Section]) -> Sequence[str]:
    """Return the parts of the summary.

    Args:
        sections: of all benchmarks, by their names; what is missing is left out.
    """
    measured = {
        (name, check.what): check.measured
        for name, section in sections.items()
        for check in section.checks
    }
    rows = [
        (question, form.format(measured[name, check]))
        for question, name, check, form in FIGURES
        if (name, check) in measured
    ]
    pictures = [f"![{title}]({path})" for path, title in PICTURES]
    return ["## At a glance", table_text(Table(("", "measured"), rows)), *pictures]
