"""Which number of Philox4x32-10 the library's kernels give each element on a CUDA device. Works on ints, numpy arrays and tensors of int64.

A generator is a seed and an offset. A kernel has `threads`, of which each draws four numbers at a time from a sequence of its own, from the offset on. A kernel that walks aligned memory takes
`vector` elements in a row for each thread and turn; `vector` 1 stands for the kernels whose threads take elements `threads` apart, four in a turn.
"""

from __future__ import annotations

from struct import pack, unpack
from typing import Any

BLOCK = 256  # threads of a block
AT_ONCE = 4  # numbers of one call of Philox
VECTOR = 16  # bytes that a thread reads at once
LOW = 0xFFFFFFFF


def threads_of(n: int, processors: int, each: int) -> int:
    """Threads of the library's kernel for n elements on a device of so many multiprocessors with so many threads each."""
    return BLOCK * min(-(-n // BLOCK), processors * (each // BLOCK))


def advance_of(n: int, threads: int) -> int:
    """By how much the kernel moves the generator's offset."""
    return ((n - 1) // (threads * AT_ONCE) + 1) * AT_ONCE


def vector_of(n: int, itemsize: int) -> int:
    """Elements that dropout's kernel takes in a row where memory is aligned."""
    vector = VECTOR // itemsize
    while n % vector:
        vector //= 2
    return vector


def place_of(i: Any, threads: int, vector: int) -> tuple[Any, Any, Any]:
    """(sequence, calls before, which of the four) of element i."""
    if vector == 1:
        rest = i % (AT_ONCE * threads)
        return rest % threads, i // (AT_ONCE * threads), rest // threads
    turn, within = i // vector, i % vector
    return turn % threads, turn // threads * max(vector // AT_ONCE, 1) + within // AT_ONCE, within % AT_ONCE


def word_of(seed: Any, offset: Any, i: Any, threads: int, vector: int) -> Any:
    """The 32 bits that element i gets; the number is bits * 2**-32 + 2**-33 in float32."""
    sequence, calls, which = place_of(i, threads, vector)
    counter = (offset >> 2) + calls
    a, b, c, d = counter & LOW, counter >> 32 & LOW, sequence & LOW, sequence >> 32 & LOW
    k, l = seed & LOW, seed >> 32 & LOW  # noqa: E741
    for _ in range(10):
        one, two = a * 0xD2511F53, c * 0xCD9E8D57  # of int64 the product's bits are right, though its sign may not be
        a, b, c, d = (two >> 32 & LOW) ^ b ^ k, two & LOW, (one >> 32 & LOW) ^ d ^ l, one & LOW
        k, l = k + 0x9E3779B9 & LOW, l + 0xBB67AE85 & LOW  # noqa: E741
    return a * (which == 0) + b * (which == 1) + c * (which == 2) + d * (which == 3)


def limit_of(keep: float) -> int:
    """How many words give a number below `keep`: those that are less than this. Numbers do not decrease with words."""
    low, high = 0, 1 << 32
    while low < high:
        word = (low + high) // 2
        low, high = (word + 1, high) if number_of(word) < keep else (low, word)
    return low


def number_of(word: int) -> float:
    """bits * 2**-32 + 2**-33, each step rounded to float32."""
    return unpack("f", pack("f", unpack("f", pack("f", float(word)))[0] * 2.0**-32 + 2.0**-33))[0]  # type: ignore[no-any-return]
