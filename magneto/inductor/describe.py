"""What is said above the text of a kernel: operations, the user's lines, fusion decisions."""

from __future__ import annotations

from collections.abc import Sequence

from magneto.inductor.loops.ir import Origin
from magneto.inductor.schedule.kernel import Kernel


def describe(step: Kernel) -> str:
    """What a kernel computes and why it is one, as a C comment: operations, the user's lines, fusion decisions."""
    lines = [f"/* {' '.join(dict.fromkeys(o.target for o in step.origins)) or 'loop'}"]
    lines += [f"   {file}:{line} in {function}" for file, line, function in user_lines(step.origins)]
    lines += [f"   fused {reason}" for reason in step.why.split("; ") if reason]
    return "\n".join(lines) + " */"


def user_lines(origins: Sequence[Origin]) -> list[tuple[str, int, str]]:
    """Innermost user frames of the operations, each once."""
    return list(dict.fromkeys(o.stack[-1] for o in origins if o.stack))
