"""The fuzzer's command line.

    python -m tests.fuzz.run --minutes 20 --seed 0 --jobs 1

Cases run in forked children, so that a crash or a hang is one more kind of failure. Each failure is made small and written, as a program that
runs alone, to `--out`; failures alike (same message, numbers aside) are made small once. Times are processor time, so that a busy machine changes
nothing. `--record FILE` keeps account of the runs: one entry for each Python, commit and first seed; `--again` runs the failures recorded there again.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import json
import os
import pickle
import platform
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.execute import Counts, run_case
from tests.fuzz.grammar import Case, case_of
from tests.fuzz.shrink import shrink

BATCH = 20
SECONDS_PER_CASE = 60.0  # of the processor, in user mode
SECONDS_IN_SILENCE = 1800.0  # of the clock

REPRODUCTION = '''"""{found}"""
import torch; torch.set_num_threads(1)
from tests.fuzz.execute import run_case
from tests.fuzz.grammar import Case

PROGRAM = """
{program}
"""
SETUP = """
{setup}
"""
print(run_case(Case({seed}, PROGRAM, SETUP, {steps!r}, {backend!r})))
'''


def forked(work: Any, seconds: float) -> Any:
    """What work(send) sent, in a child with `seconds` from one object to the next: a list; ends with ("died", how) when the child did not finish."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        status = 1
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            signal.signal(signal.SIGVTALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
            with os.fdopen(writing, "wb") as out:

                def send(value: Any) -> None:
                    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
                    data = pickle.dumps(value)
                    out.write(len(data).to_bytes(4, "big") + data)
                    out.flush()

                work(send)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return _received(reading, pid)


def _received(reading: int, pid: int) -> list[Any]:
    data, values = b"", []
    while True:
        ready, _, _ = select.select([reading], [], [], SECONDS_IN_SILENCE)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            break
        chunk = os.read(reading, 65536)
        if not chunk:
            break
        data += chunk
        while len(data) >= 4 and len(data) >= 4 + (n := int.from_bytes(data[:4], "big")):
            values.append(pickle.loads(data[4 : 4 + n]))
            data = data[4 + n :]
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if status != 0:
        signalled = os.WIFSIGNALED(status)
        values.append(("died", f"signal {os.WTERMSIG(status)}" if signalled else f"exit {os.WEXITSTATUS(status)}"))
    return values


def verdict(case: Case) -> str | None:
    """run_case in a child."""
    values = forked(lambda send: send(("verdict", run_case(case))), SECONDS_PER_CASE)
    if values and values[0][0] == "verdict":
        return values[0][1]
    return f"the process {values[-1][1]}" if values else "nothing came back"


def kind_of(found: str) -> str:
    """Failures alike have the same text but for numbers, names and steps."""
    text = re.sub(r"step \d+ \(.*?\): ", "", found.split("\n")[0], count=1)
    return re.sub(r"[-\d.]+|'.*?'|\[.*", "#", text)[:90]


def same_kind(found: str | None, wanted: str) -> bool:
    return found is not None and kind_of(found).split(":")[0].split("#")[0][:12] == kind_of(wanted).split(":")[0].split("#")[0][:12]


def batch(first: int, n: int) -> tuple[list[tuple[int, str]], Counts, int]:
    """Seeds first..first+n: failures, counts, and the seed to go on with."""

    def work(send: Any) -> None:
        counts = Counts()
        for seed in range(first, first + n):
            send(("start", seed))
            found = run_case(case_of(seed), counts)
            if found is not None:
                send(("failure", seed, found))
        send(("counts", counts))

    values = forked(work, SECONDS_PER_CASE)
    failures = [(v[1], v[2]) for v in values if v[0] == "failure"]
    counts = next((v[1] for v in values if v[0] == "counts"), Counts())
    if values and values[-1][0] == "died":
        last = max(v[1] for v in values if v[0] == "start")
        return [*failures, (last, f"the process {values[-1][1]}")], counts, last + 1
    return failures, counts, first + n


def report(seed: int, found: str, out: Path) -> None:
    case = case_of(seed)
    small = shrink(case, lambda candidate: same_kind(verdict(candidate), found))
    text = verdict(small) or found
    safe = text.replace('"""', "'''").replace("\\", "/")
    body = REPRODUCTION.format(found=safe, **dataclasses.asdict(small))
    path = out / f"failure_{platform.python_version_tuple()[1]}_{seed}.py"
    path.write_text(body)
    print(f"--- seed {seed}: {path}\n{body}", flush=True)


@dataclasses.dataclass
class Record:
    """The account of the runs, in a file that several runners may share."""

    path: Path | None
    first: int
    commit: str

    def write(self, next_seed: int, total: Counts, failures: dict[int, str]) -> None:
        entry = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "commit": self.commit,
            "seeds": [self.first, next_seed],
            "programs": total.cases,
            "calls": total.calls,
            "minutes": round(minutes_of_processor(), 2),
            "events": dict(total.events),
            "raised": dict(total.raised),
            "failures": {str(seed): found[:300] for seed, found in failures.items()},
        }
        key = f"{platform.python_version()} {self.commit} {self.first}"
        change(self.path, lambda entries: entries.update({key: entry}))


def change(path: Path | None, edit: Callable[[dict[str, Any]], None]) -> None:
    if path is None:
        return
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        entries = json.loads(file.read() or "{}")
        edit(entries)
        file.truncate(0)
        file.write(json.dumps(entries, indent=1) + "\n")


def minutes_of_processor() -> float:
    """Of this process and its children so far."""
    return sum(os.times()[:4]) / 60


def commit_of(tree: Path) -> str:
    """The commit whose code runs: of the repository, or as a copy of it says in a file `commit`."""
    if (tree / "commit").exists():
        return (tree / "commit").read_text().strip()
    return subprocess.run(["git", "-C", tree, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def again(path: Path) -> int:
    """Failures recorded for this Python that still fail; the others are marked with the commit at which they passed."""
    commit, still = commit_of(Path.cwd()), 0
    for entry in json.loads(path.read_text()).values():
        if entry["python"] != platform.python_version():
            continue
        for seed, found in entry["failures"].items():
            now = verdict(case_of(int(seed)))
            print(f"seed {seed}: {found.splitlines()[0]}: {(now or 'passes').splitlines()[0]}", flush=True)
            if now is None:
                key = f"{entry['python']} {entry['commit']} {entry['seeds'][0]}"
                change(path, lambda entries, key=key, seed=seed: entries[key].setdefault("passed_since", {}).update({seed: commit}))
            still += now is not None
    return still


def fuzz(seed: int, minutes: float, out: Path, record: Path | None) -> int:
    """Number of failures. Time spent on making them small counts as well."""
    account = Record(record, seed, commit_of(Path.cwd()))
    kinds, total, failed = set(), Counts(), {}
    while minutes_of_processor() < minutes:
        failures, counts, seed = batch(seed, BATCH)
        total.add(counts)
        for failing, found in failures:
            print(f"seed {failing}: {found[:160]}", flush=True)
            failed[failing] = found
            if kind_of(found) not in kinds:
                kinds.add(kind_of(found))
                report(failing, found, out)
        account.write(seed, total, failed)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, {minutes} minutes, next seed {seed}, {len(failed)} failures\n{total}",
        flush=True,
    )
    return len(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="of processor time")
    parser.add_argument("--seed", type=int, default=0, help="first seed; job k starts at seed + k * 1000000")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("fuzz_failures"))
    parser.add_argument("--record", type=Path, help="keep account of the run in this JSON file")
    parser.add_argument("--again", action="store_true", help="run the failures of --record again")
    parser.add_argument("--case", type=int, help="run one seed here and print its program")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.case is not None:
        case = case_of(options.case)
        print(case.program, case.setup, *case.steps, run_case(case), sep="\n")
        return
    if options.again:
        sys.exit(again(options.record) > 0)
    options.out.mkdir(exist_ok=True)
    children = [pid for k in range(1, options.jobs) if (pid := _job(options, k))]
    failed = fuzz(options.seed, options.minutes, options.out, options.record)
    failed += sum(os.waitpid(pid, 0)[1] != 0 for pid in children)
    sys.exit(failed > 0)


def _job(options: argparse.Namespace, k: int) -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(min(1, fuzz(options.seed + k * 1_000_000, options.minutes, options.out, options.record)))
    return pid


if __name__ == "__main__":
    main()
