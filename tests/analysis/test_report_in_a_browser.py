"""How a report looks in a browser, where there is one."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from machine import REQUIRED
from scrapy_bloom.analysis.pictures import INK, LIMIT, OTHER, OURS

PATIENCE = 90.0  # seconds that a browser may take
# A page is looked at in a browser, where there is one. CI installs it and says so.
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if "chromium" in REQUIRED and not CHROMIUM:
    raise RuntimeError("chromium is missing: apt-get install chromium")
# What only a browser knows. The page is in a frame, which may be narrower than any window.
FRAME = """<!DOCTYPE html>
<body style="margin: 0">
<iframe style="border: 0; width: WIDTHpx; height: 900px" srcdoc="PAGE"></iframe>
<script>
addEventListener("load", () => {
  const view = document.querySelector("iframe").contentWindow, page = view.document;
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
  const found = {
    width: view.innerWidth,
    needed: page.documentElement.scrollWidth,
    height: page.documentElement.scrollHeight,
    headings: all("h1, h2, h3").map(each => each.textContent),
    charts: all("svg").map(each => [each.getAttribute("aria-label"), box(each).width]),
    smallest: Math.min(...all("svg text").map(each => box(each).height).filter(each => each)),
    cut: all(".panel *").filter(each => outside(box(each), box(each.closest(".panel"))))
      .map(each => each.tagName + " " + each.textContent.slice(0, 40)),
    overlaps: overlaps,
    loaded: view.performance.getEntriesByType("resource").map(each => each.name),
  };
  document.body.replaceChildren(JSON.stringify(found));
});
</script>"""


def chromium(tmp_path: Path, *options: str) -> str:
    ended = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}", *options),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return ended.stdout


def looked_at(tmp_path: Path, page: str, width: int) -> dict[str, Any]:
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.replace("WIDTH", str(width)).replace("PAGE", escape(page)), "utf-8")
    dom = chromium(tmp_path, "--dump-dom", "--window-size=1400,1000", frame.as_uri())
    return json.loads(unescape(re.search("<body.*?>(.*)</body>", dom)[1]))


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [1200, 420])
def test_it_looks_right_in_a_browser(tmp_path: Path, grown_page: str, width: int) -> None:
    found = looked_at(tmp_path, grown_page, width)
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
        "Memory, and how evenly it is used",
        "Size against Scrapy's set",
        *(f"Requests in each block, generation {number}" for number in (1, 2, 3)),
    ]
    assert [name for name, _ in found["charts"]] == ["Error rate", "Memory", *["Block load"] * 3]
    assert min(size for _, size in found["charts"]) > 0.4 * min(width, 1080)

    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(grown_page, "utf-8")
    size = f"--window-size={width},{found['height']}"
    chromium(tmp_path, f"--screenshot={picture}", size, page.as_uri())
    pixels = (255 * image.imread(picture)[..., :3]).round().astype(int)
    assert pixels.shape[:2] == (found["height"], width)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 250  # letters have soft edges
    for colour, least in (
        ("#ffffff", 0.2),
        (OURS, 2e-3),
        (OTHER, 1e-3),
        (LIMIT, 3e-5),
        (INK, 5e-3),
    ):
        near = np.abs(pixels - [int(colour[at : at + 2], 16) for at in (1, 3, 5)]).max(axis=2) < 48
        assert near.mean() > least, colour
