"""The loops IR: grammar (`ir`), text (`show`: by it indices that are values are told apart). Its meaning, the reader of its text and its checks are the tests' (tests/inductor/loops)."""

from __future__ import annotations

import magneto.inductor.loops.show
