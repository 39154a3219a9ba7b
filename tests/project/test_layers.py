"""Imports go down only, hidden ones included, and nothing of the incumbent is imported: read from the source, nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.torchfree

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "magneto"

# From the bottom to the top, as in docs/design/architecture.md, section 8. A room may import rooms before it.
LAYERS = (
    "_C",
    "base",
    "symbolic",
    "graph",
    "prims",
    "dynamo",
    "aot_autograd",
    "inductor",
    "backends",
    "api",
    "debug",
    "cli",
    "",  # magneto/__init__.py and __main__.py
)
STRANGERS = {("aot_autograd", "dynamo")}  # (importer, imported) that do not know each other though the order allows it

# Rooms whose files may know each other in a circle, with the reason.
CIRCLES = {"magneto.dynamo.trackers": "values hold values: the kinds of trackers build and inspect each other"}

FORBIDDEN = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._decomp",
    "torch._refs",
    "torch._prims",
    "torch._prims_common",
    "torch._subclasses",
    "torch.fx.experimental",
    "torch._higher_order_ops",
    "sympy",
    "functorch",
)


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The layer a dotted name of ours belongs to; names that `import magneto` re-exports belong to the top."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in LAYERS else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything the file imports or reaches through the attributes of torch, at any depth."""
    yield from imports_of(path.read_text(encoding="utf-8"), module_of(path), path.name == "__init__.py")


def imports_of(text: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text, module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = ast.unparse(node.func)
            if called.rpartition(".")[2] in ("import_module", "__import__"):
                yield node.lineno, node.args[0].value
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith("torch."):
                yield node.lineno, dotted


def test_imports_go_down():
    upward = []
    for path in sources():
        importer = room_of(module_of(path))
        for line, name in imports(path):
            if name.split(".")[0] != "magneto":
                continue
            imported = room_of(name)
            if imported == "" and name == "magneto":
                upward.append(f"{path.relative_to(ROOT)}:{line} imports the package itself") if importer else None
            elif LAYERS.index(imported) > LAYERS.index(importer) or (importer, imported) in STRANGERS:
                upward.append(f"{path.relative_to(ROOT)}:{line} {importer or 'magneto'} imports {imported}: {name}")
    assert not upward, "\n" + "\n".join(upward)


def test_nothing_of_the_incumbent():
    found = []
    for path in sources():
        for line, name in imports(path):
            if any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN):
                found.append(f"{path.relative_to(ROOT)}:{line} {name}")
    assert not found, "\n" + "\n".join(found)


def test_every_folder_is_a_layer():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(LAYERS), folders - set(LAYERS)


def test_no_import_cycle():
    """Cycles between files, counting imports inside functions too (only `if TYPE_CHECKING` blocks may point back)."""
    known = {module_of(path) for path in sources()}
    graph: dict[str, set[str]] = {}
    for path in sources():
        targets = set()
        for name in _runtime_imports(path):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name and name != module_of(path):
                targets.add(name)
        graph[module_of(path)] = targets
    cycles = [" -> ".join(group) for group in strongly_connected(graph) if len(group) > 1 and not _allowed(group)]
    assert not cycles, "\n" + "\n".join(cycles)


def _allowed(group: list[str]) -> bool:
    return any(all(name.startswith(room + ".") for name in group) for room in CIRCLES)


def _runtime_imports(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            hidden.update(range(node.lineno, (node.body[-1].end_lineno or node.lineno) + 1))
    return [name for line, name in imports(path) if name.startswith("magneto") and line not in hidden]


def strongly_connected(graph: dict[str, set[str]]) -> list[list[str]]:
    """Tarjan's algorithm, without recursion."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []
    for root in graph:
        if root in index:
            continue
        work = [(root, iter(sorted(graph[root])))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            node, children = work[-1]
            for child in children:
                if child not in index:
                    index[child] = low[child] = len(index)
                    stack.append(child)
                    work.append((child, iter(sorted(graph.get(child, ())))))
                    break
                if child in stack:
                    low[node] = min(low[node], index[child])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    groups.append(stack[at:])
                    del stack[at:]
    return groups


def test_the_linter_sees_hidden_imports():
    text = "def f():\n    from torch._inductor import config\n    importlib.import_module('sympy')\n    return torch._dynamo.x\n"
    assert {"torch._inductor.config", "sympy", "torch._dynamo.x"} <= {name for _, name in imports_of(text, "magneto.base.x", False)}
    assert [name for _, name in imports_of("from .flags import config", "magneto.base.x", False)] == ["magneto.base.flags.config"]
    assert [name for _, name in imports_of("from .flags import config", "magneto.base", True)] == ["magneto.base.flags.config"]
    assert [name for _, name in imports_of("from ..graph import meta", "magneto.base.x", False)] == ["magneto.graph.meta"]
