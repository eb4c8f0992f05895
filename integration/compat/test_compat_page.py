"""The page says what a report says: what passed, what failed, and why something does not apply."""

from __future__ import annotations

from integration.compat.checks import Outcome, read_report
from integration.compat.page import page

REPORT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest" tests="5" time="61.5">
<testcase classname="tests.vllm_contract.test_points" name="test_point_stands[vllm.a:b]" time="0.1" />
<testcase classname="tests.vllm_contract.test_step" name="test_step[next_n=3-padded]" time="0.1" />
<testcase classname="tests.vllm_contract.test_rows" name="test_draft" time="0.1">
<skipped type="pytest.skip" message="only from 0.32 on">here</skipped></testcase>
<testcase classname="tests.vllm_contract.test_rows" name="test_graph" time="0.1" />
<testcase classname="tests.vllm_contract.test_ranks" name="test_two" time="0.1">
<failure message="row 3: lacks [7]&#10;and more">trace</failure></testcase>
</testsuite></testsuites>"""


def test_a_report_is_read() -> None:
    run = read_report("0.32.0", REPORT, 1)
    assert (run.version, run.seconds, run.status) == ("0.32.0", 61.5, 1)
    assert [check.outcome for check in run.checks] == [
        Outcome.PASSED,
        Outcome.PASSED,
        Outcome.NOT_APPLICABLE,
        Outcome.PASSED,
        Outcome.FAILED,
    ]
    assert [check.reason for check in run.checks[2:]] == ["only from 0.32 on", "", "row 3: lacks [7]"]


def test_the_page_has_a_column_for_each_version() -> None:
    text = page([read_report("0.31.0", REPORT, 1), read_report("0.32.0", "<testsuites><testsuite/></testsuites>", 1)])
    rows = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:] for line in text.splitlines() if "|" in line}
    rows = {title: [cell.removesuffix(" |") for cell in cells] for title, cells in rows.items()}
    assert rows["check"] == ["0.31.0", "0.32.0"]
    assert rows["points of vLLM resolved"] == ["1 of 1", "0 of 0"]
    assert rows["whole step: next_n = 3 padded"] == ["pass", "not run"]
    assert next(cells for title, cells in rows.items() if title.startswith("facts of rows")) == [
        "pass (1) [1]",
        "not run",
    ]
    assert next(cells for title, cells in rows.items() if "interleave" in title)[0] == "**1 of 1 failed**"
    assert "1. Not applicable: only from 0.32 on." in text
    assert "**None of this ran on a GPU.**" in text
