"""The error catalogue and the exceptions."""

from __future__ import annotations

import copy
import pickle
import re
import string
import warnings
from pathlib import Path

import pytest

from magneto.base import events
from magneto.base.catalogue import CATALOGUE, ROWS, ErrorEntry
from magneto.base.errors import GraphBreak, InternalError, MagnetoError, MagnetoWarning, Unsupported, UserError, format_stack, warn_once

pytestmark = pytest.mark.torchfree
PACKAGE = Path(__file__).resolve().parents[2] / "magneto"


def test_ids_are_unique():
    assert len(CATALOGUE) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_each_row_is_sound(row: ErrorEntry):
    assert re.fullmatch(r"[BUWI]\d{3}", row.id)
    assert row.template and "\n" not in row.template and not row.template.endswith(".")
    assert not row.explanation or row.explanation.endswith((".", "?", ")"))
    fields = {name: "value" for _, name, _, _ in string.Formatter().parse(row.template) if name}
    assert "{" not in row.template.format(**fields)


def _used_ids() -> dict[str, str]:
    used = {}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "catalogue.py":
            for match in re.finditer(r"""["']([BUWI]\d{3})["']""", path.read_text(encoding="utf-8")):
                used.setdefault(match.group(1), str(path.relative_to(PACKAGE)))
    return used


def test_every_id_in_the_code_has_a_row():
    missing = {id: where for id, where in _used_ids().items() if id not in CATALOGUE}
    assert not missing, missing


def test_messages():
    error = UserError("U002", name="inducter", suggestion="; did you mean 'inductor'?")
    assert error.reason == "unknown backend 'inducter'; did you mean 'inductor'?"
    assert str(error).startswith("[U002] unknown backend") and "hint:" in str(error)
    assert error.fields["name"] == "inducter"


def test_a_forgotten_field_does_not_hide_the_message():
    assert "<suggestion>" in str(UserError("U002", name="x"))
    assert "anything" in str(UserError("U999", text="anything"))


def test_graph_break_shows_the_users_line():
    stack = [(__file__, 10, "outer"), (__file__, 3, "inner")]
    error = GraphBreak("B012", stack, value="b.sum() < 0")
    assert isinstance(error, Unsupported) and isinstance(error, MagnetoError)
    assert error.where == f"{__file__}:3 in inner"
    text = str(error)
    assert text.index("line 10, in outer") < text.index("line 3, in inner")
    assert "from __future__ import annotations" in text


def test_stack_without_source():
    assert format_stack([("<nowhere>", 1, "f")]) == '  File "<nowhere>", line 1, in f'


@pytest.mark.parametrize(
    "error", [GraphBreak("B002", [("a", 1, "f")]), UserError("U006", function="f", reason="r"), InternalError("I001", what="w")]
)
def test_errors_pickle_and_copy(error):
    for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(twin) is type(error) and str(twin) == str(error) and twin.id == error.id


def test_warn_once():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            warn_once("W002")
        warn_once("W003", error="a")
        warn_once("W003", error="b")
    assert [w.message.id for w in seen] == ["W002", "W003", "W003"]
    assert all(w.category is MagnetoWarning and w.filename == __file__ for w in seen)
    assert events.count("warning") == 5
