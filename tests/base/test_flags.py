"""The flag registry: types, environment, patching, messages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from magneto.base.errors import UserError
from magneto.base.flags import BY_NAME, FLAGS, Config, Flag, checked, config, parsed

pytestmark = pytest.mark.torchfree
PACKAGE = Path(__file__).resolve().parents[2] / "magneto"


def test_at_most_forty_flags_with_unique_names():
    assert len(FLAGS) <= 40
    assert len(BY_NAME) == len(FLAGS)


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_each_row_is_sound(flag: Flag):
    assert flag.help and flag.env == f"MAGNETO_{flag.name.upper()}"
    assert type(flag.default) is flag.type
    assert not flag.choices or flag.default in flag.choices
    assert getattr(Config({}), flag.name) == flag.default


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("log", "3", 3), ("trace", "1", True), ("trace", "off", False), ("dump", "out", "out"), ("compile_timeout", "5", 5.0)],
)
def test_environment(name, text, value):
    assert getattr(Config({f"MAGNETO_{name.upper()}": text}), name) == value


@pytest.mark.parametrize(("name", "text"), [("log", "much"), ("trace", "perhaps"), ("compile_timeout", "soon"), ("recompile_limit", "0")])
def test_bad_environment_names_the_variable(name, text):
    with pytest.raises(UserError) as caught:
        Config({f"MAGNETO_{name.upper()}": text})
    assert caught.value.id == "U102"


def test_choices():
    flag = Flag("weather", str, "dry", "an example", choices=("dry", "wet"))
    assert checked(flag, "wet") == parsed(flag, " wet ") == "wet"
    with pytest.raises(UserError, match="one of dry, wet"):
        checked(flag, "cold")


def test_every_flag_does_something():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "flags.py")
    assert [flag.name for flag in FLAGS if not re.search(rf"\bconfig\.{flag.name}\b", text)] == []


def test_empty_variable_is_the_default():
    assert Config({"MAGNETO_LOG": ""}).log == 0


def test_unknown_names_raise_with_a_suggestion():
    for use in (lambda: config.recompile_limt, lambda: setattr(config, "recompile_limt", 3), lambda: config.patch(recompile_limt=3)):
        with pytest.raises(UserError, match="did you mean 'recompile_limit'"):
            use()
    assert not hasattr(config, "recompile_limt")


@pytest.mark.parametrize(("name", "value"), [("log", "3"), ("log", True), ("trace", 1), ("recompile_limit", 0), ("dump", None)])
def test_wrong_values_raise(name, value):
    before = getattr(config, name)
    with pytest.raises(UserError) as caught:
        setattr(config, name, value)
    assert caught.value.id == "U102" and name in str(caught.value)
    assert getattr(config, name) == before


def test_patch_as_block_nested_and_after_an_exception():
    with config.patch(log=2, trace=True):
        with config.patch(log=4):
            assert (config.log, config.trace) == (4, True)
            assert config.patched() == {"log": 4, "trace": True}
        assert config.log == 2
        with pytest.raises(ZeroDivisionError), config.patch(log=5):
            1 / 0  # noqa: B018
        assert config.log == 2
    assert (config.log, config.trace) == (0, False) and not config.patched()


def test_patch_is_checked_before_anything_changes():
    with pytest.raises(UserError):
        config.patch(log=2, trace="yes")
    assert config.log == 0


def test_patch_as_decorator():
    @config.patch(recompile_limit=3)
    def limit(n):
        return limit(n - 1) if n else config.recompile_limit

    assert limit(2) == 3 and config.recompile_limit == 8
    assert limit.__name__ == "limit"


def test_delete_restores_the_default():
    config.log = 3
    del config.log
    assert config.log == 0


def test_cache_key_depends_on_the_flags_that_say_so():
    key = config.cache_key()
    with config.patch(log=5, dump="x"):
        assert config.cache_key() == key
    with config.patch(march="x86-64"):
        assert config.cache_key() != key


def test_repr_shows_what_was_changed():
    with config.patch(log=5):
        assert "log=5" in repr(config) and "dump" not in repr(config)
