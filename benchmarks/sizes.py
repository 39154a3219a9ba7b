"""Programs whose sizes change from call to call: eager, torch.compile and ours, round by round in one process.

    python -m benchmarks.sizes [--only decode] [--without torch.compile] [--out DIR]

decode: 100 tokens of a small GPT-2, the cache grows by one in each call. lengths: its prompts of 51 lengths. batches: an MLP on 60 batch sizes. images: a convolutional network on 20 batch sizes. training: the small GPT-2
on batches padded to 40 lengths, gradients included.
A round is all of a program's calls; the first one pays for what is compiled. Processor time with child processes; the ways take turns, round by round. Results are compared with eager's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import cost_of, environment
from benchmarks.models import transformers
from magneto.base.text import markdown_table

WAYS = ("eager", "torch.compile", "magneto")
ROUNDS = 3
Round = Callable[[Callable[..., Any]], list[torch.Tensor]]


def gpt2() -> nn.Module:
    lib = transformers()
    config = lib.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=1000, n_positions=512, bos_token_id=None, eos_token_id=None)
    return lib.GPT2LMHeadModel(config).eval()  # type: ignore[no-any-return]


def decode() -> tuple[Callable[..., Any], Round]:
    model = gpt2()

    def step(ids: torch.Tensor, past: Any) -> Any:
        return model(input_ids=ids, past_key_values=past, use_cache=True)

    def tokens(fn: Callable[..., Any]) -> list[torch.Tensor]:
        ids, past, found = torch.arange(8)[None], None, []
        for _ in range(100):
            out = fn(ids, past)
            past, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            found.append(out.logits[:, -1])
        return found

    return step, tokens


def lengths() -> tuple[Callable[..., Any], Round]:
    model = gpt2()
    sizes = random.Random(0).sample(range(4, 200), 51)
    prompts = [torch.randint(0, 1000, (2, n), generator=torch.Generator().manual_seed(n)) for n in sizes]
    return lambda ids: model(input_ids=ids, use_cache=False).logits, lambda fn: [fn(ids) for ids in prompts]


def batches() -> tuple[Callable[..., Any], Round]:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256)).eval()
    inputs = [torch.randn(n, 256) for n in random.Random(0).sample(range(2, 300), 60)]
    return model, lambda fn: [fn(x) for x in inputs]


def images() -> tuple[Callable[..., Any], Round]:
    stages: list[nn.Module] = []
    for a, b in ((3, 32), (32, 64), (64, 128)):
        stages += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    model = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).eval()
    inputs = [torch.randn(n, 3, 64, 64) for n in random.Random(0).sample(range(2, 40), 20)]
    return model, lambda fn: [fn(x) for x in inputs]


def training() -> tuple[Callable[..., Any], Round]:
    model = gpt2()
    sizes = random.Random(0).sample(range(16, 128), 40)
    batches = [torch.randint(0, 1000, (4, n), generator=torch.Generator().manual_seed(n)) for n in sizes]

    def run(fn: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for ids in batches:
            model.zero_grad()
            with torch.enable_grad():
                fn(ids).backward()
            found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        return found

    return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss, run


PROGRAMS = {"decode": decode, "lengths": lengths, "batches": batches, "images": images, "training": training}


def optimised(way: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    if way == "torch.compile":
        return torch.compile(fn)
    if way == "magneto":
        import magneto

        return magneto.compile(fn)  # type: ignore[no-any-return]
    return fn


def measure(program: str, ways: list[str]) -> dict[str, Any]:
    torch.manual_seed(0)
    fn, run = PROGRAMS[program]()
    made = {way: optimised(way, fn) for way in ways}
    wanted = run(fn)
    report: dict[str, Any] = {way: {"rounds_s": [], "difference": 0.0} for way in ways}
    for _ in range(ROUNDS):
        for way in ways:
            found, cost = cost_of(lambda way=way: run(made[way]))  # type: ignore[misc]
            report[way]["rounds_s"].append(cost.cpu)
            apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))
            report[way]["difference"] = max(report[way]["difference"], apart)
    return report


def table(report: dict[str, Any]) -> str:
    rows = [
        [program, way, *(f"{seconds:.2f}" for seconds in row["rounds_s"]), f"{row['difference']:.0e}"]
        for program, found in report.items()
        for way, row in found.items()
    ]
    return markdown_table(rows, ["program", "way", *(f"round {k + 1}, s" for k in range(ROUNDS)), "difference"])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--without", nargs="*", default=[], choices=WAYS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    report: dict[str, Any] = {}
    with torch.no_grad():
        for program in options.only:
            report[program] = measure(program, [way for way in WAYS if way not in options.without])
            print(table({program: report[program]}), flush=True)
            if options.out is not None:
                options.out.mkdir(parents=True, exist_ok=True)
                (options.out / "sizes.json").write_text(json.dumps({"programs": report, "environment": environment()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
