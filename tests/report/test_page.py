"""The page: well-formed, whole, small, of hostile texts too; and in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep.history import read_run
from lockstep.report import SCRIPT, STYLE, policy, report_of, sentences
from tests.report.browser import CHROMIUM, MISSING, Browser
from tests.report.runs import BEGIN, HOSTILE, HOSTILE_RUN, RESTARTED, RUNS, Synthetic, write_run

NOW = BEGIN + 1e5
SHORT = {name: run for name, run in RUNS.items() if name != "long"}
SECTIONS = ["Curves", "Where a step's time goes", "Memory", "On the clock", "Checkpoints", "Data",
            "Environment", "Configuration"]  # fmt: skip
VOID = {"meta", "br", "path"}


class _Document(HTMLParser):
    """Tags, texts and titles; all that is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.links |= {value or "" for name, value in attributes if name in ("href", "src", "data", "srcset")}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(folder: Path, run: Synthetic) -> str:
    return report_of(write_run(folder, run), NOW).page()


@pytest.mark.parametrize("name", SHORT)
def test_a_page_is_whole_and_loads_nothing(tmp_path: Path, name: str) -> None:
    report = report_of(write_run(tmp_path, RUNS[name]), NOW)
    text = report.page()
    document = _Document(text)
    assert not re.search(r"url\(|@import", STYLE + SCRIPT)
    assert document.tags <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "b", "i", "em", "a", "nav", "div",
        "span", "section", "figure", "figcaption", "small", "svg", "path", "output", "table", "tr", "th", "td",
        "details", "summary", "script",
    }  # fmt: skip
    assert not {one for one in document.attributes if one.startswith("on")}
    assert all(re.fullmatch("#[a-z-]+", link) for link in document.links)
    for sentence in sentences(report.numbers):
        assert sentence in document.texts
    assert [title for title in SECTIONS if title not in document.texts] == []
    assert text.count("<script>") == 1 and f"<script>{SCRIPT}</script>" in text


def test_the_policy_allows_its_own_script_alone(tmp_path: Path) -> None:
    text = page_of(tmp_path, Synthetic())
    assert f'content="{policy()}"' in text
    assert "default-src 'none'" in policy() and "unsafe-inline'; script" in policy()
    assert "script-src 'unsafe" not in policy()


def test_sections_without_data_say_what_would_fill_them(tmp_path: Path) -> None:
    (tmp_path / "measures.jsonl").write_text('{"step": 1}\n')
    text = report_of(tmp_path, NOW).page()
    for sentence in (
        "The loss is not known: accelerator.backward(loss) tells it.",
        "The time of steps is not known: no line of measures.jsonl has it.",
        "Memory was not measured in this run.",
        "No event and no time was written: events.jsonl is not there.",
        "None was written: a run that stops has to start from the beginning. accelerator.save_state() writes one.",
        "Samples were not counted: pass the DataLoader to accelerator.prepare.",
        "How the run was started is not known: events.jsonl has no such line.",
        "No setting was written when the run started.",
    ):
        assert sentence in text


def test_the_page_says_what_was_written(tmp_path: Path) -> None:
    text = page_of(tmp_path / "gpt" / "run", RESTARTED)
    for said in (
        "rank 5 never joined all_reduce #412 that rank 0 entered at train.py:57",
        "Parameter &#39;layers.1.up.weight&#39; differs at step 900: rank 2 from ranks 0, 1, 3.",
        "loss, value 6.4, rollback, 3 batches skipped",
        "Start 2 went on from checkpoints/checkpoint_1000, step 1,000, epoch 5, 512,000 samples seen.",
        "<td>mixed_precision</td><td>bf16</td><td>--mixed-precision</td>",
        "NVIDIA H100 80GB HBM3", "checkpoints/checkpoint_1750",
        "What was done again after going back is drawn pale.",
    ):  # fmt: skip
        assert said in text
    assert text.count('class="line s3 pale"') == 6  # what was done again twice, in three charts


def test_events_of_the_script_are_listed_with_what_it_said(tmp_path: Path) -> None:
    own = {
        "event": "promoted",
        "time": BEGIN + 50,
        "attempt": 0,
        "step": 60,
        "checkpoint": "best",
        "score": 0.91,
    }
    text = page_of(tmp_path, Synthetic(events=(own,)))
    assert "<td>promoted</td>" in text and "checkpoint: best, score: 0.91</td>" in text
    assert text.count("the script&#39;s</span>") == 1


def test_hostile_names_and_values_stay_text(tmp_path: Path) -> None:
    text = page_of(tmp_path / HOSTILE.replace("/", "_").replace("\0", ""), HOSTILE_RUN)
    assert "<script>alert" not in text and "<img" not in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", text)
    assert text.count("&lt;script&gt;alert(1)") > 15
    assert "x" * 5000 not in text


def test_a_year_of_events_fits(tmp_path: Path) -> None:
    folder = write_run(tmp_path, Synthetic())
    with open(folder / "events.jsonl", "a") as file:
        for number in range(4000):
            file.write(
                f'{{"event": "spike", "time": {BEGIN + number}, "step": {number}, "sentence": "{"s" * 900}"}}\n'
            )
    text = report_of(folder, NOW).page()
    assert len(text.encode()) < 300_000
    assert "more are left out here." in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(MISSING)
    one = Browser()
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind of run, and one that only knows that it began."""
    folder = tmp_path_factory.mktemp("pages")
    folders = {name: write_run(folder / name, run) for name, run in SHORT.items()}
    folders["empty"] = folder / "empty"
    folders["empty"].mkdir()
    (folders["empty"] / "measures.jsonl").touch()
    reports = {name: report_of(one, NOW) for name, one in folders.items()}
    for name, report in reports.items():
        (folder / f"{name}.html").write_text(report.page(), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in reports}


@pytest.mark.parametrize("name", [*SHORT, "empty"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_in_a_browser_nothing_is_requested_complains_or_overflows(
    browser: Browser, pages: dict[str, Path], name: str, dark: bool
) -> None:
    for width in (400, 1200):
        browser.show(pages[name], width, dark)
        assert browser.requests == [pages[name].resolve().as_uri()]
        assert browser.complaints == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        # letters that are read at arm's length, also on a phone
        assert browser.evaluate(SMALLEST_LETTERS) >= 12
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    red = int(re.findall(r"\d+", paper)[0])
    assert (red < 64) if dark else (red == 255)


SMALLEST_LETTERS = """
Math.min(...[...document.querySelectorAll("body *")].map(one => parseFloat(getComputedStyle(one).fontSize)))
"""
LUMINANCE = """
(() => {
  const part = one => { const c = one / 255; return c <= .03928 ? c / 12.92 : Math.pow((c + .055) / 1.055, 2.4); };
  const of = text => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
    return .2126 * part(r) + .7152 * part(g) + .0722 * part(b); };
  const paper = of(getComputedStyle(document.body).backgroundColor);
  return ["p", ".quiet", ".y span", "td", "th", "a", ".status", "summary"].map(name => {
    const one = document.querySelector(name);
    if (!one) return [name, 21];
    const ink = of(getComputedStyle(one).color);
    return [name, (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05)];
  });
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_texts_stand_out_from_the_paper(browser: Browser, pages: dict[str, Path], dark: bool) -> None:
    """By the contrast ratio of WCAG 2.1, level AA."""
    browser.show(pages["restarted"], 1200, dark)
    assert [one for one in browser.evaluate(LUMINANCE) if one[1] < 4.5] == []


def test_on_paper_the_page_is_light(browser: Browser, pages: dict[str, Path]) -> None:
    browser.show(pages["restarted"], 800, dark=True, media="print")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"


def test_pointing_at_a_chart_shows_its_value(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    run = read_run(write_run(tmp_path, SHORT["crashed"]))
    browser.show(pages["crashed"], 1200)
    x, y, width = browser.evaluate(
        "(() => { const box = document.querySelector('figure .area').getBoundingClientRect();"
        " return [box.left, box.top + 20, box.width]; })()"
    )
    browser.point_at(x + width / 2, y)
    step, value = browser.evaluate("document.querySelector('figure output').textContent").split("\n")
    at = round(1 + (620 - 1) / 2)
    assert step.startswith("step ") and abs(int(step.removeprefix("step ")) - at) <= 2
    near = run.steps.loss[at - 12 : at + 10]
    assert near.min() - 0.02 <= float(value) <= near.max() + 0.02
    browser.point_at(1, 1)
    assert browser.evaluate("getComputedStyle(document.querySelector('figure output')).display") == "none"


def test_a_browser_that_would_run_what_is_hostile_is_stopped_by_the_policy(
    browser: Browser, tmp_path: Path
) -> None:
    """The page's second wall, tried: a script that got into it does not run, and loads nothing."""
    text = page_of(tmp_path / "run", Synthetic())
    planted = "<script>window.planted = 1</script><img src='https://example.org/x.png' onerror='window.planted = 2'>"
    path = tmp_path / "planted.html"
    path.write_text(text.replace("</body>", f"{planted}</body>"), encoding="utf-8")
    browser.show(path, 400)
    assert browser.evaluate("window.planted") is None
    assert any("Content Security Policy" in one for one in browser.complaints)
