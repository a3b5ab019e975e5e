"""SIGKILL at random instants: nothing that was recorded is forgotten, and no page is lost.

The instants are new in each run; what a failure says is enough to see what happened.
"""

import os
import random
import secrets
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from scrapy_bloom.job.paths import DATABASE
from scrapy_bloom.queues.job_state import read_counts
from tests.support.crawls import Crawl
from tests.support.sites import tree_site

PAGES = 300
KILLS = 3

# Forks a process that records, kills it at a random instant, and looks at what it left: over and
# over, since that takes some milliseconds, and a new Python half a second. What was recorded is
# acknowledged by a byte in a pipe, which survives the process.
KILLED_AGAIN_AND_AGAIN = """
    import logging, os, random, signal, sys, time
    from pathlib import Path
    from scrapy_bloom.files.backend import LocalBackend
    from scrapy_bloom.generations.policy import Policy

    directory, seed, rounds, forgetting = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    logging.disable()  # each round warns of the kill before
    rng = random.Random(seed)


    def made():
        backend = LocalBackend(directory, Policy(expected=300, error_rate=1e-9), sync_secs=0.01)
        backend.open()
        return backend


    def fingerprint(number):
        return number.to_bytes(20, "big")


    def record(pipe, number):
        # Opened and closed every now and then, so that a kill comes upon that, too.
        while True:
            backend = made()
            for number in range(number, number + 400):
                backend.add(fingerprint(number))
                os.write(pipe, b"+")
                if forgetting and number % 3 == 0:
                    backend.forgotten.add([fingerprint(number)])
                    os.write(pipe, b"-")
            number += 1
            backend.close()


    def main():
        known, discarded, sizes = [], [], []
        number = 0
        for _ in range(rounds):
            reading, writing = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    record(writing, number)
                finally:
                    os._exit(1)
            os.close(writing)
            # While it is opened, or when it has told of so many: a slow machine records as much.
            wanted = rng.choice([0, rng.randrange(1, 900)])
            told = b""
            with open(reading, "rb", buffering=0) as pipe:
                while len(told) < wanted and (more := pipe.read(wanted - len(told))):
                    told += more
                time.sleep(rng.uniform(0, 0.01))
                os.kill(pid, signal.SIGKILL)
                told += pipe.read()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            for sign in told.decode():
                if sign == "+":
                    known.append(number)
                    number += 1
                else:
                    discarded.append(known.pop())
            number += 1  # it may have been recorded, or half of it, and not acknowledged
            if forgetting and known and known[-1] % 3 == 0:
                known.pop()  # it may have been forgotten, or half of it
            backend = made()
            forgotten = [each for each in known if fingerprint(each) not in backend]
            assert not forgotten, f"forgotten: {forgotten}"
            # A kill may leave one that was being forgotten, but no more.
            assert sum(fingerprint(each) in backend for each in discarded) <= rounds
            sizes.append(len(backend.status().generations))
            count = backend.status().count
            backend.close()
        known += discarded  # they are counted as recorded
        assert abs(count - len(known)) <= 0.02 * len(known) + rounds, (count, len(known))
        print(len(known), len(discarded), sizes[-1])


    main()
"""


@pytest.mark.parametrize("forgetting", [0, 1], ids=["growing", "growing and forgetting"])
def test_what_was_recorded_is_found_after_every_kill(forgetting: int, tmp_path: Path) -> None:
    """Kills come while a filter records, grows, forgets, opens and closes."""
    seed = secrets.randbelow(10**6)
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED_AGAIN_AND_AGAIN), os.fspath(tmp_path)]
        + [str(each) for each in (seed, 25, forgetting)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, f"seed {seed}: {ran.stderr}"
    known, discarded, generations = map(int, ran.stdout.split())
    assert known > 1000, f"seed {seed}: hardly anything was recorded"
    assert (discarded > 300) == bool(forgetting)
    assert generations > 2


SAFE = {
    "SCHEDULER": "scrapy_bloom.CrashSafeScheduler",
    "JOBDIR": "job",
    "BLOOM_EXPECTED_REQUESTS": 30,
}


def test_every_page_is_crawled_after_kills_at_random_instants(tmp_path: Path) -> None:
    """The job resumes without a warning, and only what was in flight is crawled twice."""
    seed = secrets.randbelow(10**6)
    rng = random.Random(seed)
    site = tree_site(PAGES)
    killed, again = [], 0
    for number in range(KILLS):
        site.delay = 0.1
        site.hold_after(60)  # it must not be done before it is killed
        before = site.total()
        crawl = Crawl(site.url, tmp_path, SAFE)
        # Either while it is opened, or somewhere in between; never when all is done.
        hits = rng.choice([0, rng.randrange(1, 12), rng.randrange(12, 30)]) if number else 15
        moment = rng.uniform(0, 0.3 if hits == 0 else 0.05)
        crawl.wait_until(
            lambda: (
                "Overridden settings" in crawl.output  # noqa: B023
                and site.total() >= before + hits  # noqa: B023
            )
        )
        time.sleep(moment)
        assert crawl.running(), f"seed {seed}: {crawl.output}"
        crawl.kill()
        site.settle()
        if (tmp_path / "job" / DATABASE).exists():
            again += read_counts(tmp_path / "job" / DATABASE)[1]
        killed.append((hits, round(moment, 3)))
    what = f"seed {seed}, killed after (hits, seconds more) {killed}"
    assert len(site.hits) < PAGES, what
    site.delay = 0
    crawl = Crawl(site.url, tmp_path, SAFE)
    assert crawl.finish() == 0, f"{what}: {crawl.output}"
    assert "'finish_reason': 'finished'" in crawl.output, what
    assert set(site.hits) == {f"/p/{number}" for number in range(PAGES)}, what
    assert not crawl.lines("ERROR") + crawl.told("WARNING"), f"{what}: {crawl.output}"
    assert "Queue and filter are complete: nothing is lost" in crawl.output, what
    assert read_counts(tmp_path / "job" / DATABASE) == (0, 0), what
    twice = sum(count - 1 for path, count in site.hits.items() if path != "/p/0")
    assert twice <= again, what
    site.end()
