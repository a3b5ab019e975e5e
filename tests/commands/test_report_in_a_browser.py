"""How a report looks in a browser, where there is one."""

from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, browser

# What only a browser knows.
LOOK = """(() => {
  const seen = element => element.getClientRects().length > 0;
  const all = selector => [...document.querySelectorAll(selector)].filter(seen);
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
    needed: document.documentElement.scrollWidth,
    headings: all("h1, h2, h3").map(each => each.textContent),
    charts: all("svg").map(each => [each.querySelector("title").textContent, box(each).width]),
    smallest: Math.min(...all("svg text").map(each => box(each).height).filter(each => each)),
    cut: all(".panel *").filter(each => outside(box(each), box(each.closest(".panel"))))
      .map(each => each.tagName + " " + each.textContent.slice(0, 40)),
    overlaps: overlaps,
    loaded: performance.getEntriesByType("resource").map(each => each.name),
  };
})()"""


@pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here")
@pytest.mark.parametrize("width", [1200, 420])  # pixels, of a window and of a telephone
def test_it_looks_right_in_a_browser(width: int, tmp_path: Path, grown_page: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(grown_page, "utf-8")
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    with browser(tmp_path / "profile") as reader:
        reader.send("Emulation.setDeviceMetricsOverride", **metrics)
        reader.open(page.as_uri())
        found = reader.run(LOOK)
    assert found["needed"] <= width
    assert found["cut"] == []
    assert found["overlaps"] == []
    assert found["loaded"] == []
    assert found["smallest"] >= 10  # pixels, of a line of text
    assert found["headings"] == ["Bloom filter of shop", "Generations", "Error rate"]
    ((name, size),) = found["charts"]
    assert name == "Error rate"
    assert size > 0.4 * min(width, 1080)
