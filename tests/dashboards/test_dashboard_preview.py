"""The static page: what it shows of a good, a missing and a hostile answer, and what it says without Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fake_prometheus import Answer, answering, matrix
from typer.testing import CliRunner

from kvplugin.cli.main import app
from kvplugin.dashboards.errors import PrometheusError
from kvplugin.dashboards.overview import OVERVIEW
from kvplugin.dashboards.panel import Dashboard, Kind, Panel, Query, Row, Unit
from kvplugin.dashboards.preview import Choices, chosen_values, render_preview
from kvplugin.dashboards.prometheus import Prometheus, Span

SPAN = Span(1000.0, 1060.0, 1.0)
CHOICES = Choices(SPAN, "10s", {})
NAN, HOSTILE = "NaN", "<script>alert(1)</script>"


def page_of(*panels: Panel, answer: Answer, choices: Choices = CHOICES) -> str:
    board = Dashboard("uid", "title", "description", (), (Row("row", panels),))
    with answering(lambda path, query: answer) as url:
        return render_preview(board, Prometheus(url), choices)


def lines(**fields: Any) -> Panel:
    return Panel("panel", "what it means", (Query("rate(x[1m])", "{{arm}} rate"),), Unit.PER_SECOND, **fields)


def test_lines_have_a_name_and_a_last_value() -> None:
    page = page_of(lines(), answer=matrix(({"arm": "a"}, [(1000, "1"), (1001, "2"), (1002, NAN)])))
    assert 'data-series="1"' in page
    assert re.search(r"a rate <b>2</b>", page)
    assert page.count("<polyline") == 1


def test_a_gap_splits_a_line() -> None:
    page = page_of(lines(), answer=matrix(({}, [(1000, "1"), (1001, "1"), (1030, "1"), (1031, "1")])))
    assert page.count("<polyline") == 2


def test_nothing_and_nothing_but_nan_say_so() -> None:
    for answer in (matrix(), matrix(({"arm": "a"}, [(1000, NAN)]))):
        page = page_of(lines(only_with="placement before_topk"), answer=answer)
        assert "No data: needs placement before_topk" in page
        assert "<svg" not in page


def test_states_are_words_and_bad_ones_are_marked() -> None:
    panel = lines(kind=Kind.STATE, below=1, words=((0, "off"), (1, "on")))
    page = page_of(panel, answer=matrix(({"arm": "a"}, [(1000, "1"), (1001, "0")]), ({"arm": "b"}, [(1000, "1")])))
    assert '<div class="state bad"><b>off</b>a rate</div>' in page
    assert '<div class="state"><b>on</b>b rate</div>' in page


def test_a_limit_is_drawn_where_it_can_be_seen() -> None:
    answer = matrix(({}, [(1000, "0.3"), (1001, "0.4")]))
    assert page_of(lines(above=0.25), answer=answer).count('class="limit"') == 1
    assert page_of(lines(above=100), answer=answer).count('class="limit"') == 0
    assert page_of(lines(), answer=answer).count('class="limit"') == 0


def test_label_values_are_text() -> None:
    page = page_of(lines(), answer=matrix(({"arm": HOSTILE}, [(1000, "1"), (1001, "2")])))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_the_page_needs_nothing_else() -> None:
    page = page_of(lines(), answer=matrix(({}, [(1000, "1")])))
    assert "default-src 'none'" in page
    assert not re.search(r"<script|<link|<img|src=|@import|url\(", page)


@pytest.mark.parametrize(
    ("arms", "given", "baseline"),
    [
        (["candidate", "control"], {}, "control"),
        (["b", "a"], {}, "a"),
        ([], {}, "control"),
        (["candidate", "control"], {"baseline": "candidate"}, "candidate"),
    ],
)
def test_the_baseline_is_an_arm_that_is_there(arms: list[str], given: dict[str, str], baseline: str) -> None:
    with answering(lambda path, query: (200, {"status": "success", "data": arms})) as url:
        values = chosen_values(OVERVIEW, Prometheus(url), Choices(SPAN, "10s", given))
    assert values["$baseline"] == baseline
    assert values["$instance"] == ".*"
    assert values["$__rate_interval"] == "10s"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"status": "error", "error": "parse error: oh"}), "parse error: oh"),
        ((502, "<html>Bad Gateway</html>"), "HTTP 502"),
        ((200, "<html>a shop</html>"), "answers, and not as Prometheus does"),
        ((200, {"status": "success"}), "answers, and not as Prometheus does"),
    ],
)
def test_what_is_no_prometheus_is_named(answer: Answer, message: str) -> None:
    with answering(lambda path, query: answer) as url, pytest.raises(PrometheusError) as raised:
        Prometheus(url).over_time("up", SPAN)
    assert str(raised.value) == f"{url}: {message}; give --prometheus the address of a Prometheus server"


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["dashboards", "preview", *arguments])
    return found.exit_code, found.output + (str(found.exception) if found.exception else "")


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    asked: list[dict[str, str]] = []

    def answer(path: str, query: dict[str, str]) -> Answer:
        asked.append(query)
        if "label" in path:
            return 200, {"status": "success", "data": ["control"]}
        return matrix(({"arm": "control"}, [(float(query["end"]) - 1, "1"), (float(query["end"]), "2")]))

    out = tmp_path / "new" / "page.html"
    with answering(answer) as url:
        status, output = run("--prometheus", url, "--out", str(out), "--window", "5m", "--arm", "con.*")
    assert (status, output) == (0, f"{out}\n")
    page = out.read_text()
    assert page.count("<section") == len(OVERVIEW.panels)
    assert "No data" not in page
    ranges = [query for query in asked if "query" in query]
    assert len(ranges) == sum(len(panel.queries) for panel in OVERVIEW.panels)
    assert all(round(float(query["end"]) - float(query["start"])) == 300 for query in ranges)
    assert not any("$" in query["query"] for query in ranges)
    assert any('arm=~"con.*"' in query["query"] for query in ranges)


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    out = str(tmp_path / "page.html")
    status, output = run("--prometheus", "http://127.0.0.1:9", "--out", out)
    assert status != 0
    assert "http://127.0.0.1:9: " in output
    assert "give --prometheus the address" in output
    status, output = run("--prometheus", "http://127.0.0.1:9", "--out", out, "--window", "an hour")
    assert status == 2
    assert "'an hour': give a number and s, m, h or d, such as 30m" in re.sub(r"[\s│]+", " ", output)
    (tmp_path / "file").touch()
    with answering(lambda path, query: (200, {"data": []}) if "label" in path else matrix()) as url:
        status, output = run("--prometheus", url, "--out", str(tmp_path / "file" / "page.html"))
    assert status != 0
    assert "--out: " in output
    assert "give a place that can be written" in output
