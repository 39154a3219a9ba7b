"""The loop over a convolution's terms, in Triton's text: a block of places of the result times a block of its channels.

Where channels fill blocks of terms, a turn reads some channels of one place in every window; otherwise (images of three colours) a block of terms walks places and channels together. What a window covers
beyond the image is zero.
"""

from __future__ import annotations

from magneto.inductor.codegen.cpp_emit import indent
from magneto.inductor.schedule.product import ProductKernel


def window_sums(step: ProductKernel, image: str, weight: str, row: str, column: str, precision: str) -> list[str]:
    """`image`, `weight`: pointers; `row`, `column`: of the block's elements, each within the result."""
    window, terms = step.window, step.tiles.terms
    assert window is not None
    (high, wide), (tall, broad), channels = window.size, window.result, int(step.a.shape[-1])  # type: ignore[arg-type]
    turns = -(-channels // terms)
    single = high * wide == 1
    if apart := 3 * turns * terms <= 4 * channels:
        count, end, term = turns * high * wide, channels, "channel"
        turn = [f"channel = {f'step % {turns} * KBLOCK + ' if turns > 1 else ''}k"]
        turn += [f"down, over = step // {turns * wide}, {f'step // {turns}' if turns > 1 else 'step'} % {wide}"] * (not single)
    else:
        count, end, term = -(-high * wide * channels // terms), high * wide * channels, "term"
        turn = [
            "term = step * KBLOCK + k",
            f"down, over, channel = term // {wide * channels}, term // {channels} % {wide}, term % {channels}",
        ]
    masked = end % terms != 0
    inside = [f"({term} < {end})[None, :]"] * masked
    for axis, place, k in (("high", "down", 0), ("wide", "over", 1)):
        if window.padding[k]:
            turn.append(f"at = {axis}" + f" + {place}{'' if apart else '[None, :]'} * {window.dilation[k]}" * (not single))
            turn.append(f"{place}_inside = (at >= 0) & (at < {window.image[k]})")
            inside.append(f"{place}_inside")
    names = ("down", "over", "channel")[2 * single :]
    by_image, by_row, by_column, by_channel = step.a.strides
    steps = (window.dilation[0] * by_row, window.dilation[1] * by_column, by_channel)  # type: ignore[operator]
    texts = [
        _load("left", names, steps, "[None, :]", " & ".join(inside)),
        _load("right", names, step.b.strides[:3], "[:, None]", f"({term} < {end})[:, None]" * masked),
    ]
    return [
        f"high, wide = {row} // {broad} % {tall} * {window.stride[0]} - {window.padding[0]}, {row} % {broad} * {window.stride[1]} - {window.padding[1]}",
        f"left = {image} + {row} // {tall * broad} * {by_image} + high * {by_row} + wide * {by_column}",
        f"right = {weight} + {column} * {step.b.strides[3]}",
        "k = tl.arange(0, KBLOCK)",
        f"sums = tl.zeros(({step.tiles.rows}, {step.tiles.columns}), tl.float32)",
        f"for step in range(0, {count}):",
        *indent([*turn, f"sums = tl.dot({', '.join(texts)}, sums{precision})"]),
    ]


def _load(base: str, names: tuple[str, ...], steps: tuple[object, ...], spread: str, mask: str) -> str:
    """What lies so many steps behind the pointers."""
    place = " + ".join(f"{name} * {step}" if step != 1 else name for name, step in zip(names, steps[-len(names) :], strict=True))
    return f"tl.load({base} + ({place}){spread}{f', mask={mask}, other=0' if mask else ''})"
