"""How a report looks in a browser, where there is one."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from tests.support.machine import REQUIRED

PATIENCE = 90.0  # seconds that a browser may take
# A page is looked at in a browser, where there is one. CI installs it and says so.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if "chromium" in REQUIRED and not CHROMIUM:
    raise RuntimeError("chromium is missing: apt-get install chromium")
WIDTHS = [1200, 420]  # pixels, of a window and of a telephone
# The page in frames side by side, which may be narrower than any window.
FRAMES = """<!DOCTYPE html>
<style>body { margin: 0; display: flex } iframe { border: 0; flex: none }</style>
<body>"""
FRAME = """<iframe style="width: WIDTHpx; height: HEIGHTpx" srcdoc="PAGE"></iframe>"""
# What only a browser knows.
LOOK = """<script>
addEventListener("load", () => {
  const looked = [...document.querySelectorAll("iframe")].map(each => look(each.contentWindow));
  document.body.replaceChildren(JSON.stringify(looked));
});
function look(view) {
  const page = view.document;
  const seen = element => element.getClientRects().length > 0;
  const all = selector => [...page.querySelectorAll(selector)].filter(seen);
  const box = element => element.getBoundingClientRect();
  const outside = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1;
  const overlaps = [];
  for (const svg of all("svg")) {
    const texts = [...svg.querySelectorAll("text")].map(each => [each.textContent, box(each)]);
    for (const [i, [a, p]] of texts.entries())
      for (const [b, q] of texts.slice(i + 1))
        if (Math.min(p.right, q.right) - Math.max(p.left, q.left) > 2
            && Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top) > 4) overlaps.push([a, b]);
  }
  return {
    width: view.innerWidth,
    needed: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    headings: all("h1, h2, h3").map(each => each.textContent),
    charts: all("svg").map(each => [each.querySelector("title").textContent, box(each).width]),
    smallest: Math.min(...all("svg text").map(each => box(each).height).filter(each => each)),
    cut: all(".panel *").filter(each => outside(box(each), box(each.closest(".panel"))))
      .map(each => each.tagName + " " + each.textContent.slice(0, 40)),
    overlaps: overlaps,
    loaded: view.performance.getEntriesByType("resource").map(each => each.name),
  };
}
</script>"""


def chromium(tmp_path: Path, *options: str) -> str:
    ended = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--disable-extensions", "--no-first-run"),
            *("--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}", *options),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return ended.stdout


def frames(path: Path, page: str, height: int) -> str:
    """A file with the page in its frames; its address."""
    empty = "".join(FRAME.replace("WIDTH", str(width)) for width in WIDTHS)
    filled = empty.replace("HEIGHT", str(height)).replace("PAGE", escape(page))
    path.write_text(FRAMES + filled, "utf-8")
    return path.as_uri()


def looked_at(tmp_path: Path, page: str) -> list[dict[str, Any]]:
    path = tmp_path / "look.html"
    address = frames(path, page, 900)
    with path.open("a", encoding="utf-8") as file:
        file.write(LOOK)
    dom = chromium(tmp_path, "--dump-dom", "--window-size=1800,1000", address)
    return json.loads(unescape(re.search("<body.*?>(.*)</body>", dom)[1]))


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
def test_it_looks_right_in_a_browser(tmp_path: Path, grown_page: str) -> None:
    looked = looked_at(tmp_path, grown_page)
    for width, found in zip(WIDTHS, looked, strict=True):
        check_layout(found, width)


def check_layout(found: dict[str, Any], width: int) -> None:
    assert found["width"] == width
    assert found["needed"] <= width
    assert found["cut"] == []
    assert found["overlaps"] == []
    assert found["loaded"] == []
    assert found["smallest"] >= 10  # pixels, of a line of text
    assert found["headings"] == [
        "Bloom filter of shop",
        "Generations",
        "Error rate",
    ]
    assert [name for name, _ in found["charts"]] == ["Error rate"]
    assert min(size for _, size in found["charts"]) > 0.4 * min(width, 1080)
