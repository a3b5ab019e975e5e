"""Write the figures of a filter and its queue in the text format of Prometheus."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_FILTER = {
    "recorded": ("recorded_requests", "Requests recorded in the filter."),
    "capacity": ("capacity_requests", "Requests that the filter has room for."),
    "bytes": ("size_bytes", "Size of the filter."),
    "fill_ratio": ("fill_ratio", "Share of the bits that are set, 0 to 1."),
    "error_rate_now": ("false_positive_rate", "False-positive rate of the next lookup, 0 to 1."),
    "forgotten": ("forgotten_requests", "Recorded requests that are to be crawled again."),
}
_QUEUE = {
    "pending": ("pending_requests", "Requests in the queue that are not in flight."),
    "in_flight": ("in_flight_requests", "Requests that workers have taken and not finished."),
    "dead": ("dead_letters", "Requests that are not crawled because their workers died."),
    "set_aside": ("set_aside_requests", "Requests that no worker can deserialize."),
    "done": ("done_requests_total", "Requests finished since the queue began."),
}
_WORKER = {
    "is_alive": ("worker_up", "Whether the lease of the worker is valid."),
    "in_flight": (
        "worker_in_flight_requests",
        "Requests that the worker has taken and not finished.",
    ),
    "done": ("worker_done_requests_total", "Requests that the worker has finished."),
    "heartbeat_secs": ("worker_heartbeat_age_seconds", "Time since the worker's last heartbeat."),
}
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def prometheus_text(figures: Mapping[str, Any]) -> str:
    """Return the figures of `scrapy bloom info` as metrics, without those that are unknown."""
    place = {"filter": figures["location"]}
    queue = figures["queue"] or {}
    if "dead" in queue:
        queue = {**queue, "dead": len(queue["dead"])}
    groups: list[tuple[Mapping[str, tuple[str, str]], list[tuple[dict[str, str], Any]]]] = [
        (_FILTER, [(place, figures)]),
        (_QUEUE, [(place, queue)]),
        (
            _WORKER,
            [({**place, "worker": each["name"]}, each) for each in queue.get("workers") or ()],
        ),
    ]
    lines: list[str] = []
    for metrics, samples in groups:
        for figure, (name, meaning) in metrics.items():
            lines += _metric(f"scrapy_bloom_{name}", meaning, figure, samples)
    return "".join(f"{line}\n" for line in lines)


def _metric(
    name: str,
    meaning: str,
    figure: str,
    samples: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]],
) -> Iterator[str]:
    known = [
        (labels, values[figure]) for labels, values in samples if values.get(figure) is not None
    ]
    if not known:
        return
    yield f"# HELP {name} {meaning}"
    yield f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}"
    for labels, value in known:
        text = ",".join(f'{key}="{label.translate(_ESCAPES)}"' for key, label in labels.items())
        yield f"{name}{{{text}}} {float(value) if isinstance(value, float) else int(value)}"
