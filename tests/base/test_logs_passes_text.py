"""The log ladder, dumps, the pass runner, and text."""

from __future__ import annotations

import inspect
import subprocess
import sys
import traceback

import pytest

from magneto.base import events, logs, text
from magneto.base.errors import InternalError
from magneto.base.flags import config
from magneto.base.passes import Pass, run_passes

pytestmark = pytest.mark.torchfree


def test_the_ladder(capsys):
    def never():
        raise AssertionError("text nobody reads is not made")

    logs.log(1, never)
    with config.patch(log=2):
        logs.log(1, "a break")
        logs.log(2, lambda: "a graph\nof two lines")
        logs.log(3, never)
    assert capsys.readouterr().err == "[magneto 1] a break\n[magneto 2] a graph\n[magneto 2] of two lines\n"


def test_trace_shows_kernels_alone(capsys):
    logs.trace_kernel("silent")
    with config.patch(trace=True):
        logs.log(1, "silent")
        logs.trace_kernel("for (;;) {}", "kernel_0")
    err = capsys.readouterr().err
    assert "silent" not in err and "for (;;) {}" in err and "kernel_0" in err


def test_dump_numbers_files_and_goes_on_where_another_process_stopped(tmp_path):
    assert logs.dump("nothing", ".py", "x") is None
    (tmp_path / "0006_old.py").write_text("")
    with config.patch(dump=str(tmp_path)):
        first = logs.dump("a graph/of f", ".py", "print('alone')")
        logs.dump("kernel", ".cpp", lambda: "int x;")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0006_old.py", "0007_a_graph_of_f.py", "0008_kernel.cpp"]
    assert subprocess.run([sys.executable, first], capture_output=True, text=True).stdout == "alone\n"


def test_a_dump_directory_that_cannot_be_used_only_warns(tmp_path):
    (tmp_path / "file").write_text("")
    with config.patch(dump=str(tmp_path / "file")), pytest.warns(UserWarning, match="W202"):
        assert logs.dump("a", ".txt", "b") is None


def add_one(ir):
    return [*ir, len(ir)]


def nothing(ir):
    return ir


def test_passes_run_in_order_and_are_timed():
    assert run_passes([Pass("add_one", add_one), Pass("nothing", nothing), Pass("add_again", add_one)], []) == [0, 1]
    assert list(events.timings()) == ["add_one", "nothing", "add_again"]


def test_passes_get_the_context():
    assert run_passes([Pass("shift", lambda ir, by: ir + by)], 1, context=5) == 6


def test_an_invalid_result_names_the_pass():
    def verify(ir):
        if len(ir) > 1:
            raise ValueError("too long")

    with config.patch(verify=True), pytest.raises(InternalError) as caught:
        run_passes([Pass("first", add_one), Pass("second", add_one)], [], verify)
    assert caught.value.id == "I002" and "second" in str(caught.value) and "too long" in str(caught.value)
    with config.patch(verify=False):
        assert run_passes([Pass("first", add_one), Pass("second", add_one)], [], verify) == [0, 1]


def test_passes_log_and_dump_changes_only(capsys, tmp_path):
    with config.patch(log=6, dump=str(tmp_path)):
        run_passes([Pass("add_one", add_one), Pass("nothing", nothing)], [], label="f")
    err = capsys.readouterr().err
    assert "f: add_one: changed" in err and "f: nothing: unchanged" in err
    assert [path.name for path in tmp_path.iterdir()] == ["0001_f_add_one.txt"]


def test_generated_source_is_visible():
    namespace = text.compile_source("adder", "def add(a, b):\n    return a + b  # plus\n", {})
    assert "# plus" in inspect.getsource(namespace["add"])
    with pytest.raises(TypeError) as caught:
        namespace["add"](1, "x")
    assert "return a + b  # plus" in "".join(traceback.format_exception(caught.value))
    same = text.register_source("adder", "def add(a, b):\n    return a + b  # plus\n")
    other = text.register_source("adder", "x = 1")
    assert same == namespace["add"].__code__.co_filename != other


def test_did_you_mean():
    assert text.did_you_mean("inducter", ["eager", "inductor"]) == "; did you mean 'inductor'?"
    assert text.did_you_mean("zzz", ["eager"]) == ""


def test_tables():
    assert text.table([["a", 1.5], ["long", 22.0]], ["name", "n"]) == "name    n\n----  ---\na     1.5\nlong   22"
    assert text.table([]) == ""
    assert text.markdown_table([["a|b", None]], ["x", "y"]) == "| x | y |\n|---|---|\n| a\\|b |  |"


def test_indent_and_plural():
    assert text.indent("a\n\nb", 2) == "  a\n\n  b"
    assert (text.plural(1, "graph"), text.plural(2, "graph"), text.plural(2, "entry", "entries")) == ("1 graph", "2 graphs", "2 entries")
