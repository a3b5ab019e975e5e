"""What a filter knows of the logs of the crawls that have used it: the file `logs.json`.

By it a crawl finds out whether filter and log belong together: one of them may be older, missing,
or of another job.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scrapy_bloom.exceptions import StorageError
from scrapy_bloom.files.log import FilterLog
from scrapy_bloom.job.disk import write_note
from scrapy_bloom.job.paths import check_file

NAME = "logs.json"
_MOST_LOGS = 1000  # the ones that were used last; a nightly crawl has a new one each time
_MOST_BYTES = 32 << 20  # what 1000 logs never take


@dataclass
class LogRecord:
    """What a filter has of a log.

    Attributes:
        path: where the log was.
        run: the opening of the log in which this was written.
        seq: the last batch whose changes the filter may have.
        left: how many requests were not done then.
    """

    path: str
    run: str
    seq: int
    left: int


@dataclass
class LogRecords:
    """The records of a filter's logs, by their ids, the one that was used last at the end.

    Attributes:
        open: the id of the log whose crawl uses the filter, or was killed; empty if there is none.
    """

    logs: dict[str, LogRecord] = field(default_factory=dict)
    open: str = ""

    @classmethod
    def read(cls, directory: Path) -> "LogRecords":
        """Read the records of the filter in a directory; raises StorageError if damaged."""
        path = directory / NAME
        try:
            found = json.loads(_contents(path))
            logs = {id_: _record(each) for id_, each in found["logs"].items()}
            return cls(logs, _checked(found["open"], str))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise StorageError(
                f"{path} cannot be read: {error}; it was left as it is: restore it from a backup, "
                "or move it away with the filter beside it, to start with an empty filter"
            ) from error

    def note(self, log: FilterLog, seq: int) -> None:
        """Note that the filter may have the changes of a log up to a batch."""
        self.logs.pop(log.id, None)
        self.logs[log.id] = LogRecord(log.path, log.run, seq, log.left)
        for oldest in list(self.logs)[:-_MOST_LOGS]:
            del self.logs[oldest]

    def write(self, directory: Path) -> None:
        """Write the records to the disk, whole or not at all; raises OSError."""
        write_note(directory / NAME, json.dumps(asdict(self), indent=1))

    def misfit(self, log: FilterLog, *, has_filter: bool, is_own: bool) -> "Misfit | None":
        """Return what is wrong with a log and a filter that are to be used together, if anything.

        Args:
            log: opened, and not begun.
            has_filter: whether there is a filter.
            is_own: the filter is the job's own, so each of its crawls had this log.
        """
        record = self.logs.get(log.id) if has_filter else None
        of_job = [id_ for id_, each in self.logs.items() if is_own or each.path == log.path]
        last = of_job[-1] if has_filter and of_job else log.id
        log_is_older, why = True, ""
        if last != log.id and (last == self.open or self.logs[last].left):
            why = f"{log.name} is not the queue that the filter was used with"
        elif record is None:
            if log.applied:
                log_is_older, why = False, f"the filter lacks what {log.name} has recorded"
        elif log.is_copy:
            why = f"{log.name} was copied or moved while a crawl used it, or after it was killed"
        elif not log.has_run(record.run) or record.seq > log.seq:
            why = f"{log.name} is older than the filter"
        elif record.seq < log.applied:
            log_is_older, why = False, f"the filter is older than {log.name}"
        return Misfit(why, log_is_older=log_is_older) if why else None


@dataclass
class Misfit:
    """A filter and a log that do not belong together.

    Attributes:
        why: for people.
        log_is_older: the filter may have recorded requests that the log has lost. Otherwise pages
            are crawled again, and none is lost.
    """

    why: str
    log_is_older: bool = True


def _contents(path: Path) -> bytes:
    check_file(path)
    with path.open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is longer than {_MOST_BYTES:,} bytes")
    return data


def _record(found: Mapping[str, Any]) -> LogRecord:
    new = LogRecord(**found)
    for name, kind in LogRecord.__annotations__.items():
        _checked(getattr(new, name), kind)
    if not new.run.isascii():  # no database can be asked for half a character
        raise ValueError("there is no such run")
    return new


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.50} is not of type {kind.__name__}")
    return value
