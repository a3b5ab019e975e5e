"""What MkDocs does beside: README and its neighbours are pages; nothing comes from elsewhere."""

import re
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
FETCHED = re.compile(r"<(?:script|img|link rel=.(?:stylesheet|preconnect).)[^>]+=.https?://[^>]*>")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the neighbours of docs/, with links as they are from within."""
    for name, page in NEIGHBOURS.items():
        text = LINK.sub(lambda link: _from_docs(link[1]), (ROOT / name).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))


def on_page_markdown(markdown: str, *, config: MkDocsConfig, **_: object) -> str:
    """Have links out of docs/ lead to the neighbours' pages, or to the repository."""

    def inside(link: re.Match[str]) -> str:
        if not link[1].startswith("../"):
            return link[1]
        target = link[1].removeprefix("../")
        return NEIGHBOURS.get(target) or f"{config.extra['repository']}/blob/main/{target}"

    return LINK.sub(inside, markdown)


def on_post_page(output: str, *, page: Page, **_: object) -> None:
    """Refuse a page for which a browser would ask another server."""
    if found := FETCHED.search(output):
        raise PluginError(f"{page.file.src_path} fetches {found[0]}")


def _from_docs(link: str) -> str:
    return link.removeprefix("docs/") if link.startswith("docs/") else f"../{link}"
