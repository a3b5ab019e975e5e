"""Passwords are in no message, wherever a URL was put, and however it was misspelt."""

from pathlib import Path

import pytest

from scrapy_bloom.text import masked
from tests.support.cli import bloom
from tests.support.crawls import Crawl
from tests.support.sites import Site
from tests.support.workspace import fingerprints, make_filter, urls

SECRET = "hushhush"
MISSPELT = [
    f"redis:{SECRET}@localhost",
    f"redis:/:{SECRET}@localhost",
    f"rediss//:{SECRET}@localhost",
    f"REDIS:me:{SECRET}@localhost:6379/0",
    f"redis:localhost?password={SECRET}",
    f"redis+sentinel:{SECRET}@localhost",
    f"redis+cluster//:{SECRET}@localhost",
    f"unix:{SECRET}@/run/redis.sock",
]


@pytest.mark.parametrize("url", [f"redis://:{SECRET}@localhost/0", MISSPELT[0]])
def test_in_a_wrong_setting(url: str, tree: Site, tmp_path: Path) -> None:
    settings = {"BLOOM_REDIS_KEY": url}
    error = Crawl(tree.url, tmp_path, settings).refusal()
    assert "BLOOM_REDIS_KEY is a URL (it is not logged)" in error
    assert SECRET not in (tmp_path / "crawl-0.log").read_text()
    assert not tree.hits
    assert SECRET not in "".join(str(file) for file in tmp_path.rglob("*"))
    ran = bloom("info", "redis#k", "-s", f"BLOOM_REDIS_KEY={url}", cwd=tmp_path)
    assert "BLOOM_REDIS_KEY is a URL" in ran.error
    assert SECRET not in ran.out + ran.err


LOGINS = [f":my {SECRET}", f"[[user]:password@]{SECRET}", f"[[me]:{SECRET}", f"a\t{SECRET}:x"]
REFUSED = [
    f"redis+tls://:{SECRET}@h/0?password={SECRET}",
    f"redis://:{SECRET}@127.0.0.1:1/0#shop:bloom",
    f"redis://:1234#{SECRET}@127.0.0.1:1/0",
    *(
        f"{scheme}{login}@h"
        for login in LOGINS
        for scheme in ("rediss+tls://", "redis://", "redis:")
    ),
]
COMMANDS = [
    *(("info", "URL"), ("info", "filter", "URL"), ("import", "URL", "new"), ("plan", "URL")),
    *(("check", "filter", "URL"), ("copy", "filter", "URL"), ("copy", "URL", "copy"), ("URL",)),
]


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_in_a_url_that_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    make_filter(tmp_path / "filter", fingerprints(urls(range(3))))
    before = sorted(tmp_path.rglob("*"))
    for url in REFUSED if arguments == ("info", "URL") else REFUSED[:3]:
        ran = bloom(
            *[url if argument == "URL" else argument for argument in arguments], cwd=tmp_path
        )
        assert ran.status in (1, 2), url
        assert SECRET not in ran.out + ran.err, url
        assert "error: " in ran.err
        assert "Traceback" not in ran.err
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("url", MISSPELT)
def test_however_it_is_misspelt(url: str) -> None:
    assert SECRET not in masked(f"{url} is not valid")


def test_the_allowed_form_can_be_read(tmp_path: Path) -> None:
    ran = bloom("info", f"redis://:{SECRET}@a b#k", cwd=tmp_path)
    assert "use redis://[[user]:password@]host[:port][/database], with" in ran.error
    assert SECRET not in ran.error
    ran = bloom("info", f"redis+sentinel://:{SECRET}@a,b#k", cwd=tmp_path)
    assert "use redis+sentinel://[[user]:password@]host[:port][,host" in ran.error
    assert SECRET not in ran.error


@pytest.mark.parametrize("piece", ["a", "a:", "a:/", "@", ":", "?", "a@", " ", ":@"])
def test_masking_takes_a_time_that_grows_with_the_text(piece: str) -> None:
    """A quadratic one would take hours for this text."""
    assert masked(f"http://℀{piece * 10**6}").startswith("http://")
