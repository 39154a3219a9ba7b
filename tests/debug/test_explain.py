"""explain and the report."""

from __future__ import annotations

import torch

import magneto
from magneto.base import events
from magneto.debug.explain import BreakReason, Explanation, explain
from magneto.debug.report import breaks, html, write_report


def two_breaks(x, log):
    y = x.sin()
    if y.sum() > 100:
        return y
    log.append((y * 2).tolist())
    return y.cos() + 1


def test_graphs_breaks_and_ops_are_counted():
    log = []
    result = explain(two_breaks, torch.ones(3), log)
    assert isinstance(result, Explanation) and len(log) == 1
    assert len(result.graphs) == len(result.break_reasons) + 1 == 3
    assert sum(map(len, result.ops_per_graph)) >= 4
    assert "two_breaks" in result.explanation
    assert [reason.where.partition(" in ")[2] for reason in result.break_reasons] == ["two_breaks", "two_breaks"]
    assert result.break_reasons[0].source == "if y.sum() > 100:"


def test_unpacking_and_indexing():
    result = explain(lambda x: x + 1, torch.ones(3))
    assert len(tuple(result)) == len(result) == 6
    assert result[2] is result.graphs and result[0] == result.explanation


def test_an_exception_of_the_function_is_kept_with_what_was_captured():
    def fails(x):
        y = x + 1
        raise ValueError(str(y.shape))

    result = explain(fails, torch.ones(3))
    assert isinstance(result.error, ValueError)
    assert "ValueError" in str(result)


def test_guards_are_listed_once():
    result = explain(lambda x, n: x + n, torch.ones(3), 4)
    assert result.out_guards and len(set(result.out_guards)) == len(result.out_guards)


def test_reasons_without_a_stack_print():
    reason = BreakReason("B002", "because")
    assert str(reason) == "[B002] because" and reason.where == "" and reason.source == ""


def test_report_is_one_page_that_names_the_breaks(tmp_path):
    magneto.optimize("eager")(two_breaks)(torch.ones(3), [])
    page = write_report(tmp_path / "report.html", "a <title>").read_text()
    assert "a &lt;title&gt;" in page and "B012" in page and "if y.sum() &gt; 100:" in page
    assert "two_breaks" in page and "src=" not in page
    assert len(breaks()) == 2


def test_report_of_nothing():
    events.reset()
    assert "none: every function was captured whole" in html()
