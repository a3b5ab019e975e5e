"""How many links of real sites are plain: fingerprinted without w3lib's canonicalize_url."""

import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit

from scrapy import Request
from scrapy.http import HtmlResponse
from scrapy.utils.request import fingerprint

from benchmarks.shared.report import Section, Table, all_of
from benchmarks.shared.sites import site_module
from scrapy_bloom.crawl.fingerprinting import plain_fingerprint

PYTHON_DOC = Path("/usr/share/doc/python3-doc/html")
APT_LISTS = Path("/var/lib/apt/lists")
FEW = 500  # links of each, to see that it runs


def run(quick: bool) -> Section:  # noqa: FBT001 - every benchmark is called like this
    found = {name: Counter(links()) for name, links in CORPORA.items()}
    counted = {
        name: Counter(dict(links.most_common(FEW if quick else None)))
        for name, links in found.items()
    }
    plain = {url for links in counted.values() for url in links if plain_fingerprint(url)}
    right = sum(fingerprint(Request(url)) == plain_fingerprint(url) for url in plain)
    missing = [name for name, links in counted.items() if not links]
    return Section(
        title="Plain URLs",
        method=(
            "The links of Python's documentation (Debian's package python3-doc) and of the example "
            "project's site, as `response.follow` requests them, and the home pages of all of "
            "Debian's packages. Outside are those that are not plain, so that w3lib makes them "
            "canonical. Each plain one's fingerprint is compared with Scrapy's."
        ),
        checks=[all_of("plain URLs that have Scrapy's fingerprint", right, len(plain))],
        tables=[
            Table(
                ("", "links", "different", "outside, of links", "of different", "because of"),
                [_row(name, links) for name, links in counted.items() if links],
            )
        ],
        notes=f"Not here, so not measured: {', '.join(missing)}." if missing else "",
    )


def _row(name: str, links: Mapping[str, int]) -> tuple[str, ...]:
    outside = [url for url in links if plain_fingerprint(url) is None]
    reasons = Counter(map(_reason, outside)).most_common()
    return (
        name,
        f"{sum(links.values()):,}",
        f"{len(links):,}",
        f"{sum(links[url] for url in outside) / sum(links.values()):.2%}",
        f"{len(outside) / len(links):.2%}",
        ", ".join(f"{reason} {count:,}" for reason, count in reasons),
    )


def _reason(url: str) -> str:
    """The first part without which the URL is plain."""
    for part, rest in (("fragment", r"#.*"), ("query", r"\?.*"), ("path", r"(?<=[^/:])/.*")):
        if plain_fingerprint(url := re.sub(rf"{rest}$", "", url, flags=re.DOTALL)):
            return part
    return "host"


def _of_python_doc() -> Iterator[str]:
    for page in sorted(PYTHON_DOC.rglob("*.html")):
        base = f"https://docs.python.org/3/{page.relative_to(PYTHON_DOC)}"
        response = HtmlResponse(base, body=page.read_bytes())
        for request in response.follow_all(css='a[href]:not([href^="mailto:"])'):
            yield request.url


def _of_the_example() -> Iterator[str]:
    site: Any = site_module()
    navigation = site._navigation()  # noqa: SLF001 - the example's own, and read like a tutorial
    home = "http://127.0.0.1:8000/"
    seen, pages = {home}, [home]
    while pages:
        page = pages.pop()
        path, query = urlsplit(page)[2:4]
        linked = site.links(path, dict(parse_qsl(query)))
        for link in [] if linked is None else [*navigation, *linked]:
            url = urljoin(page, link)
            yield url
            if url not in seen:
                seen.add(url)
                pages.append(url)


def _of_debian() -> Iterator[str]:
    for listed in sorted(APT_LISTS.glob("*debian*_Packages*")):
        command = ["/usr/lib/apt/apt-helper", "cat-file", str(listed)]
        text = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout.decode()
        for url in re.findall(r"^Homepage: (https?://.+)$", text, re.MULTILINE):
            yield Request(url).url


CORPORA: Mapping[str, Callable[[], Iterator[str]]] = {
    "python3-doc": _of_python_doc,
    "example site": _of_the_example,
    "home pages in Debian": _of_debian,
}
