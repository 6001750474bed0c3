"""Every page of the built site in a real browser: nothing is wider than the window, and every picture is there.

`make site-look` builds the site and runs this. It needs Chromium: `apt-get install chromium`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site.browser import Browser
from tests.site.pages import ROOT

pytestmark = pytest.mark.browser
SITE = ROOT / "site"
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html"))
WIDTHS, SCHEMES = (420, 1280), ("default", "slate")
# Code, and pictures of a terminal, scroll by themselves. Nothing else may be cut or stand beside the window.
WIDE = """(() => {
  const window_ = document.documentElement.clientWidth, found = [];
  const page = document.documentElement.scrollWidth;
  if (page > window_) found.push(`the page is ${page} wide`);
  const scrolls = "pre, p:has(> img[src$='terminal.svg']), p:has(> img[src$='top.svg'])";
  for (const one of document.querySelectorAll("article *, .md-footer *, .md-header *")) {
    const box = one.getBoundingClientRect(), style = getComputedStyle(one);
    const isShown = box.width > 1 && box.height > 1 && style.visibility == "visible" && style.opacity != "0";
    if (!isShown || one.closest(scrolls)?.contains(one) && !one.matches(scrolls)) continue;
    const isCut = one.matches("table, td, th, td *") && one.clientWidth > 0 && one.scrollWidth > one.clientWidth + 1;
    if (box.right > window_ + 1 || box.left < -1 || isCut && style.display != "inline")
      found.push(`${one.tagName} from ${box.left} to ${box.right}: ${one.textContent.trim().slice(0, 40)}`);
  }
  return found.slice(0, 3);
})()"""
# Of text in cells and code, the contrast of WCAG 2: (lighter + 0.05) / (darker + 0.05).
FAINT = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const over = (colours) => {
    canvas.fillStyle = "#fff"; canvas.fillRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const parts = [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255)
      .map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const found = new Set();
  for (const one of document.querySelectorAll("article :is(h1, h2, h3, p, li, td, th, a, code, pre span)")) {
    if (!one.innerText?.trim() || one.closest(".headerlink")) continue;
    const backs = [];
    for (let two = one; two; two = two.parentElement) backs.unshift(getComputedStyle(two).backgroundColor);
    const [back, text] = [over(backs), over([...backs, getComputedStyle(one).color])];
    const contrast = (Math.max(back, text) + 0.05) / (Math.min(back, text) + 0.05);
    const name = `${one.tagName}.${one.className}: ${one.innerText.trim().slice(0, 20)}`;
    if (contrast < 3) found.add(`${name} has contrast ${contrast.toFixed(1)}`);
  }
  return [...found].slice(0, 3);
})()"""
STILL = "*, *::before, *::after { transition: none !important; }"
BROKEN = "[...document.images].filter((one) => !one.complete || !one.naturalWidth).map((one) => one.src)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.process.kill()
    browser.process.wait()


def seen(browser: Browser, page: Path) -> dict[str, list[str]]:
    """What is wrong with a page in each window and scheme."""
    browser.open(page, WIDTHS[0])
    browser.evaluate(f"document.head.insertAdjacentHTML('beforeend', '<style>{STILL}</style>')")
    found = {"pictures": browser.evaluate(BROKEN)}
    for width in WIDTHS:
        browser.resize(width)
        for scheme in SCHEMES:
            browser.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
            found[f"{width} {scheme}"] = browser.evaluate(WIDE)
            found[f"contrast {scheme}"] = browser.evaluate(FAINT)
    return {where: what for where, what in found.items() if what}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_its_window(browser: Browser, page: str) -> None:
    assert seen(browser, SITE / page) == {}


def test_the_whole_site_is_looked_at() -> None:
    assert len(PAGES) > 150, "build the site first: make docs"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ("<div style='width: 500px'>wide</div>", "420 default"),
        ("<table style='width: 1400px'><tr><td>wide</td></tr></table>", "1280 slate"),
        (
            "<table style='display: block; width: 300px; overflow: auto'><tr><td>" + "x" * 90 + "</table>",
            "420 slate",
        ),
        ("<img src='no_such.png'>", "pictures"),
        ("<p style='color: #ddd; background: #fff'>faint</p>", "contrast slate"),
    ],
)
def test_a_page_that_cannot_be_read_is_noticed(
    browser: Browser, tmp_path: Path, body: str, where: str
) -> None:
    (tmp_path / "page.html").write_text(f"<!doctype html><body><article>{body}</article>", encoding="utf-8")
    assert where in seen(browser, tmp_path / "page.html")


def test_an_old_link_to_a_method_leads_to_its_page(browser: Browser) -> None:
    name = "lockstep.accelerator.Accelerator.gather_for_metrics"
    browser.open(SITE / "reference/names/index.html", 1280, f"#{name}")
    while "/reference/names/" in browser.evaluate("location.href"):
        browser.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert browser.evaluate("location.href").endswith(f"/reference/api/Accelerator/#{name}")
