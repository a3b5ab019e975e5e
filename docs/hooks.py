"""Add to MkDocs: README and its neighbours as pages, messages in the search, no other servers."""

import json
import re
from itertools import count
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages of the site that are files beside docs/, where GitHub looks for them.
NEIGHBOURS = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#]*)")
LINE_OF_LOG = re.compile("INFO (<code>.*?</code>)(.*?)(?= INFO |<p>|$)", re.DOTALL)
FETCHED = re.compile(r"<(?:script|img|link rel=.(?:stylesheet|preconnect).)[^>]+=.https?://[^>]*>")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the neighbours of docs/, with links as they are from within."""
    for name, page in NEIGHBOURS.items():
        text = LINK.sub(lambda link: _from_docs(link[1]), (ROOT / name).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Keep pages for developers low in the search; turn links out of docs/ into whole ones."""
    if page.parent and page.parent.title == "Development":
        page.meta["search"] = {"boost": 0.1}

    def inside(link: re.Match[str]) -> str:
        if not link[1].startswith("../"):
            return link[1]
        target = link[1].removeprefix("../")
        return NEIGHBOURS.get(target) or f"{config.repo_url}/blob/main/{target}"

    return LINK.sub(inside, markdown)


def on_page_content(html: str, *, page: Page, **_: object) -> str:
    """Give each message, and each line of the log, an address of its own."""
    if page.file.name not in {"troubleshooting", "stats"}:
        return html
    first, *sections = re.split(r'(?=<h[23] id=")', html)
    return first + "".join(map(_with_addresses, sections))


def _with_addresses(section: str) -> str:
    heading = re.findall(r'^<h[23] id="(.+?)"', section)[0]
    number = count(1)

    def with_address(tag: re.Match[str]) -> str:
        return f'<{tag[1] or tag[2]} id="{heading}.{next(number)}">'

    return re.sub(r"<(li)>(?=<code>)|<(tr)>(?=\s*<td>INFO)", with_address, section)


def on_post_build(config: MkDocsConfig) -> None:
    """Make each message an entry of the search: long sections would come before the right one."""
    path = Path(config.site_dir, "search/search_index.json")
    index = json.loads(path.read_text("utf-8"))
    docs = []
    for doc in index["docs"]:
        docs.append(doc)
        if doc["location"].startswith("troubleshooting/#"):
            messages = re.findall("<li>(<code>.*?</code>)</li>", doc["text"])
            doc["text"] = re.sub("<ul>.*</ul>", "", doc["text"], flags=re.DOTALL)
            docs += [
                _message(f"{doc['location']}.{number}", message, doc["text"], 0.4)
                for number, message in enumerate(messages, 1)
            ]
        elif doc["location"].startswith("stats/#lines"):
            docs += [
                _message(f"{doc['location']}.{number}", line, meaning, 0.3)
                for number, (line, meaning) in enumerate(LINE_OF_LOG.findall(doc["text"]), 1)
            ]
    path.write_text(json.dumps({**index, "docs": docs}), "utf-8")


def _message(location: str, message: str, text: str, boost: float) -> dict[str, object]:
    return {
        "location": location,
        "title": message,
        "text": f"<p>message_text</p> {text}",  # a pasted one must have that word
        "boost": boost,  # else they would come before the pages on what they mention
    }


def on_post_page(output: str, *, page: Page, **_: object) -> None:
    """Refuse a page for which a browser would ask another server."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_path} fetches {found[0]}")


def _from_docs(link: str) -> str:
    return link.removeprefix("docs/") if link.startswith("docs/") else f"../{link}"
