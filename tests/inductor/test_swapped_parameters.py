"""What a plan remembers of parameters does not stand in the way of a program that swaps or replaces them."""

from __future__ import annotations

import torch

import magneto


def test_a_parameter_is_swapped_after_an_inference() -> None:
    linear = torch.nn.Linear(4, 4)
    fn = magneto.optimize("inductor")(lambda x: linear(x).relu() + linear.weight.t()[1:, :2].sum())
    x = torch.ones(2, 4)
    with torch.no_grad():
        for number in range(4):
            for _ in range(3):
                fn(x)
            torch.utils.swap_tensors(linear.weight, torch.nn.Parameter(torch.full((4, 4), float(number))))
            expected = (x @ linear.weight.t() + linear.bias).relu() + 6.0 * number
            torch.testing.assert_close(fn(x), expected)


def test_new_memory_behind_a_parameter() -> None:
    linear = torch.nn.Linear(4, 4)
    fn = magneto.optimize("inductor")(lambda x: linear(x))
    x = torch.ones(2, 4)
    with torch.no_grad():
        for number in range(3):
            for _ in range(3):
                torch.testing.assert_close(fn(x), x @ linear.weight.t() + linear.bias)
            linear.weight.data = torch.full((4, 4), float(number))
            torch.testing.assert_close(fn(x), x @ linear.weight.t() + linear.bias)
            linear.weight.mul_(2)
            torch.testing.assert_close(fn(x), x @ linear.weight.t() + linear.bias)
