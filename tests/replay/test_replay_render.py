"""The report for people: terminal table and one HTML file, looked at in a real browser where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from kvplugin.replay import Capture, CaptureReport, MissingExtra, replay_capture
from kvplugin.replay.render.page import render_html
from kvplugin.replay.render.plots import Point, heat_strips, merge_strip, scatter
from kvplugin.replay.render.table import render_table
from kvplugin.replay.selftest.faults import dropped_key, other_group
from kvplugin.replay.selftest.synthetic import Shape, make_record

SHAPE = Shape(latent=32, rope=16, topk=48, length=200, queries=3, world=3)
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
HOSTILE = '<script>alert(1)</script> & "x" [red]'


@pytest.fixture(scope="module")
def drifted() -> CaptureReport:
    """Three layers, one that drops its newest key and one that reads another's selection."""
    records = [make_record(SHAPE, seed=layer, layer=layer) for layer in range(3)]
    bad = (records[0], dropped_key(records[1], records[0]), other_group(records[2], records[0]))
    return replay_capture(Capture("engine", HOSTILE, tuple(replace(each, request=HOSTILE) for each in bad)))


@pytest.fixture(scope="module")
def clean() -> CaptureReport:
    return replay_capture(Capture("engine", "model", (make_record(Shape()),)))


def text_of(report: CaptureReport, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_table(report))
    return console.export_text()


def test_the_table_says_where(drifted: CaptureReport) -> None:
    text = text_of(drifted, 120)
    assert "drift at stage attention: request " in text
    assert "layer 1, step 0, position 199" in text
    assert "reproduced by: the newest key is not attended to" in text
    assert "out, engine vs replay" in text
    assert HOSTILE in text, "markup in names is not interpreted"
    assert "oracle transformer_engine: not installed" in text


def test_the_table_of_a_match(clean: CaptureReport) -> None:
    text = text_of(clean)
    assert "decode matches prefill: 1 records within tolerance" in text
    assert "beyond tolerance" not in text
    headings = next(line for line in text.splitlines() if line.startswith("request"))
    assert headings.split() == [
        "request",
        "layer",
        "step",
        "at",
        "identity",
        "cache",
        "indexer",
        "select",
        "attend",
        "logprob",
    ]


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_else(drifted: CaptureReport) -> None:
    page = Page(render_html(drifted))
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "action", "onload", "style")
        if name == "href":
            assert value is not None
            assert value.startswith("#")
    assert not re.search(r"url\(|@import|https?:", render_html(drifted))


def test_names_in_the_page_are_text(drifted: CaptureReport) -> None:
    assert HOSTILE in Page(render_html(drifted)).text


def test_the_page_shows_every_part(drifted: CaptureReport) -> None:
    html = render_html(drifted)
    page = Page(html)
    assert page.tags.count("details") == len(drifted.records)
    for heading in ("Output drift by position", "Output drift by layer", "Selection by block", "Merge order", "Stages"):
        assert heading in page.text
    assert html.count('class="over"') == html.count("<circle") - html.count('class="within"') > 0
    assert "rank 2" in page.text


def test_every_link_leads_to_a_record(drifted: CaptureReport) -> None:
    page = Page(render_html(drifted))
    ids = {value for name, value in page.attributes if name == "id"}
    links = [value for name, value in page.attributes if name == "href" and value]
    assert len(set(links)) == len(drifted.records)
    assert {link.removeprefix("#") for link in links} <= ids


def test_pages_of_a_dense_match_and_of_a_refusal(clean: CaptureReport) -> None:
    assert "attention is dense" in render_html(clean)
    record = make_record(Shape())
    broken = replace(record, inputs=replace(record.inputs, key_position_ids=record.inputs.key_position_ids + 1))
    report = replay_capture(Capture("engine", "model", (broken,)))
    assert report.first_drift is not None
    assert report.first_drift.stage == "identity"
    assert "key_position_ids: row 0, token 0: 1; must equal" in Page(render_html(report)).text


def test_plots_of_many_points_stay_small() -> None:
    assert len(heat_strips([("layer", [0.5] * 100_000)])) < 60_000
    assert len(merge_strip(range(100_000), [])) < 200_000
    one = scatter([Point(5, 0.0, "a")], "layer")
    assert one.count("<circle") == 1
    assert "nan" not in one + scatter([Point(0, 1e30, "a"), Point(9, 1e-30, "b")], "layer")


def test_without_jinja2_the_command_to_install_it(clean: CaptureReport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra, match=r"jinja2 is not installed; the HTML report needs it; pip install"):
        render_html(clean)


@needs_browser
def test_in_a_browser(drifted: CaptureReport, tmp_path: Path) -> None:
    """Chromium lays the page out from the file alone: nothing is requested, nothing overflows, the plots have size."""
    probe = """<script>
      const wide = [...document.querySelectorAll('svg')].filter(e => e.getBoundingClientRect().width < 5);
      document.title = ['probe', document.querySelectorAll('circle.over').length, wide.length,
        document.documentElement.scrollWidth <= innerWidth, performance.getEntriesByType('resource').length,
        document.querySelectorAll('details[open]').length].join(' ');
    </script>"""
    # The page forbids scripts; only the probe's copy allows one.
    page = render_html(drifted).replace(
        "style-src 'unsafe-inline'", "style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    )
    (tmp_path / "report.html").write_text(page.replace("</body>", probe + "</body>"))
    arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1000,900",
        f"--user-data-dir={tmp_path}/p",
    ]
    assert BROWSER is not None
    finished = subprocess.run(
        [BROWSER, *arguments, "--dump-dom", (tmp_path / "report.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", finished.stdout)
    assert title is not None
    over = sum(share > 1 for record in drifted.records for share in record.position_share)
    assert title[1].split() == ["probe", str(2 * over), "0", "true", "0", "2"]
