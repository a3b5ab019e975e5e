"""Job directories in which another user may write: what docs/security.md says of their files."""

import os
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

from scrapy_bloom.job.jobdir import FILE
from scrapy_bloom.queues.serialized import with_line
from scrapy_bloom.queues.store import State
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.request_queues import Trap, fill
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls, write_urls

JOB = {"JOBDIR": "job", "SCHEDULER": "scrapy_bloom.CrashSafeScheduler"}
URL = "http://127.0.0.1:9/"
COMMANDS = [
    *("info job --scan", "queue job", "queue job --failed --json", "report job -o page"),
    *("check job urls", f"add job {URL}new", "stop job", "copy job copy", "import urls job"),
    *("queue job --failed --requeue --yes", "queue job --drop-host  --yes", "reset job --yes"),
]


def test_no_command_loads_a_pickle(tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    job = tmp_path / "job"
    make_filter(job, fingerprints(urls(range(50))))
    fill(job / FILE, *[with_line("GET", URL, trap)] * 2)
    with closing(sqlite3.connect(job / FILE)) as db, db:
        db.execute("UPDATE requests SET state = ? WHERE id = 1", (State.FAILED,))
    (job / "requests.queue").mkdir()
    for name in ("spider.state", "requests.queue/active.json", "requests.queue/0"):
        (job / name).write_bytes(trap)
    write_urls(tmp_path / "urls", urls(range(60)))
    for command in COMMANDS:
        ran = bloom(*command.split(" "), cwd=tmp_path)
        assert "Traceback" not in ran.err, (command, ran)
        assert not (tmp_path / "sprung").exists(), command


def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    write_urls(tmp_path / "urls", urls(range(9)))
    under = ("sh", "-c", 'umask 027; exec "$@"', "sh")
    assert bloom("import", "urls", "job", cwd=tmp_path, under=under).status == 0
    fill(tmp_path / "job" / FILE, b"1")
    assert bloom("add", "job", URL, cwd=tmp_path, under=under).status == 0
    assert bloom("copy", "job", "copy", cwd=tmp_path, under=under).status == 1
    for name in (FILE, "inbox.sqlite"):
        assert (tmp_path / "job" / name).stat().st_mode & 0o777 == 0o640


def test_a_sparse_file_is_read_in_place(tree: Site, tmp_path: Path) -> None:
    """No command copies the file of a job that was killed, which may seem to have gigabytes."""
    Crawl.held(tree, 10, tmp_path, JOB).kill()
    os.truncate(tmp_path / "job" / FILE, 3 << 30)
    under = ("bash", "-c", 'ulimit -f 1024; exec timeout 60 "$@"', "bash")  # in KiB
    for command in ("info job --json", "queue job --json"):
        ran = bloom(*command.split(), cwd=tmp_path, under=under)
        assert ran.status == 0, ran
