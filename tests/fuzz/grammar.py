"""Random whole programs from a seed: functions over ints, strings, containers, objects, modules and tensors, and a scenario that calls them.

A `Case` is text only: the program (executed behind the prelude), the statements that make its arguments, and a list of steps. A step is one
statement executed in the program's namespace: a change of the environment, or a call of `entry` (the plain or the optimised `main`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

INDENT = "    "
NAMES = {"T": "tuvw", "I": "ijkm", "F": "fg", "B": "pq", "S": "s", "L": "ab", "D": "d", "O": "o", "C": "h"}
FIXED = {
    "T": ["x", "y", "G_T", "box.t", "items[0]", "items[-1]", "net.weight[0]", "net.steps"],
    "I": ["n", "G_N", "box.value", "len(items)", "x.shape[0]", "y.dim()", "box.twice", "net.calls", "len(box.log)"],
    "F": ["G_F", "net.scale", "0.5", "-1.25"],
    "B": [
        "flag",
        "G_FLAG",
        "net.training",
        "x.requires_grad",
        "torch.is_grad_enabled()",
        "isinstance(box, Sub)",
        "magneto.is_compiling() or True",
    ],
    "S": ["mode", "box.kind", "net.mode", "'abc'"],
    "L": ["G_L", "box.shared", "[1, 2, 3]", "list(range(3))"],
    "D": ["table", "G_D", "net.cache"],
    "O": ["box", "G_BOX"],
    "C": ["torch.sin", "F.relu", "box", "box.scale", "Box.plain", "G_FN"],
}


@dataclass(frozen=True)
class Case:
    seed: int
    program: str
    setup: str
    steps: tuple[str, ...]
    backend: str = "eager"


class Scope:
    """Names of a function's locals by kind; `jumps`: what may leave the present block."""

    def __init__(self, parent: Scope | None = None, params: dict[str, list[str]] | None = None) -> None:
        self.names: dict[str, list[str]] = {kind: list((params or {}).get(kind, [])) for kind in NAMES}
        self.parent = parent
        self.loop = False
        self.depth = parent.depth + 1 if parent else 0


class Generator:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fresh = 0
        self.helpers: list[str] = []
        self.size = self.rng.choice([2, 3, 4, 6, 8])
        self.breaks = self.rng.random() < 0.5

    # ---- choices ----

    def pick(self, *options: str) -> str:
        return self.rng.choice(options)

    def fill(self, e: Callable[[str], str], *options: str) -> str:
        """One of the options, with an expression of its kind for each <K>; all <a> are the same tensor."""
        text = self.rng.choice(options)
        if "<a>" in text:
            text = text.replace("<a>", e("T"))
        return re.sub("<([A-Z])>", lambda found: e(found[1]), text)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def name(self, kind: str, scope: Scope) -> str:
        """A name to write: a known one of the kind, or another."""
        known = scope.names[kind]
        if known and self.chance(0.5):
            return self.rng.choice(known)
        self.fresh += 1
        return f"{self.rng.choice(NAMES[kind])}{self.fresh % 5}"

    def bind(self, kind: str, name: str, scope: Scope) -> str:
        for names in scope.names.values():
            if name in names:
                names.remove(name)
        scope.names[kind].append(name)
        return name

    def known(self, kind: str, scope: Scope) -> str:
        names = list(scope.names[kind])
        outer = scope.parent
        while outer is not None:
            names += outer.names[kind]
            outer = outer.parent
        if names and self.chance(0.7):
            return self.rng.choice(names)
        return self.rng.choice(FIXED[kind])

    # ---- expressions ----

    def expr(self, kind: str, scope: Scope, depth: int = 2) -> str:
        if depth <= 0 or self.chance(0.25):
            return self.known(kind, scope)
        return getattr(self, f"expr_{kind}")(lambda k: self.expr(k, scope, depth - 1), scope)

    def expr_T(self, e: Callable[[str], str], scope: Scope) -> str:
        r = self.rng.random()
        if r < 0.25:
            return self.fill(e, "(<T> + <T>)", "(<T> * <T>)", "(<T> - <F>)", "(<T> * <I>)", "(-<T>)")
        if r < 0.55:
            return self.fill(
                e,
                "<a>.sin()", "torch.relu(<a>)", "F.gelu(<a>)", "<a>.sum(0)", "<a>.mean(-1, keepdim=True)", "<a>.sum()", "<a>[0]",
                "<a>[..., :2].sum()", "<a>[:<I>].sum()", "<a>.clone()", "<a>.detach()", "<a>.view(-1)[:4]", "<a>.t()", "<a>.reshape(-1)[0]",
                "<a>.to(torch.float64)", "<a>.float()", "<a>.expand(3, 4)", "<a>.unbind(0)[0]", "torch.zeros_like(<a>)", "<a>.masked_fill(<a> > 0, 1.0)",
                "<a>.abs().max()", "torch.softmax(<a>, -1)", "<a>.contiguous()", "<a>.unsqueeze(0)[0]", "<a>.chunk(2, -1)[0].sum()", "<a>.max(0)[0]",
                "<a>.transpose(0, -1).sum(0)", "<a>.clamp(min=<F>)", "<a>.type_as(<T>)", "<a>.view_as(<a>)", "<a>[<a> > 0].sum()", "<a>.pow(2)",
                "<a>.narrow(-1, 0, 2).sum()", "F.layer_norm(<a>, <a>.shape[-1:])", "<a>.cumsum(0)", "<a>.sort()[0]", "<a>.data", "<a>[None].squeeze(0)",
                "<a>.requires_grad_()",
            )  # fmt: skip
        if r < 0.68:
            return self.fill(
                e,
                "torch.where(<T> > 0, <T>, <T>)", "torch.full((4,), <F>)", "torch.arange(4.0)", "torch.rand(4)", "torch.tensor(<F>)",
                "F.dropout(<T>, 0.5, <B>)", "torch.cat([<T>.reshape(-1), <T>.reshape(-1)])[:4]", "torch.stack([<T>, <T>]).sum(0)",
                "torch.zeros(4, dtype=torch.get_default_dtype())", "F.linear(<T>, net.weight)", "torch.tensor(<L>).sum() * 1.0", "torch.randn_like(x)",
                "torch.ones(<I> % 4 + 1).sum()", "torch.matmul(<T>, net.weight)", "x.new_ones(4)",
            )  # fmt: skip
        return self.fill(
                e,
            "(<T> if <B> else <T>)", "net(<T>)", "net(<T>, <I>)", "<O>.scale(<T>)", "<O>(<T>)", "<C>(<T>)",
            "apply(<C>, <T>)", "sum([<T>, <T>])", "functools.reduce(operator.add, [<T>, <T>])", "(lambda z: z * 2)(<T>)",
            "sum(z.sum() for z in items)", "list(map(<C>, [<T>, <T>]))[<I> % 2]", "next(pieces(<T>))", "[*both(x)][<I> % 4]",
            "functools.partial(torch.add, <T>)(<T>)", "{'k': <T>}['k']", "(<T>, <T>)[<B>]", "copy.copy(<T>)",
            "Pair(<T>, <I>).left", "Point(<I>, <T>).y", "Frozen(t=<T>).t", "Slotted(<T>).a", "Box.make(<I>).t",
            "dataclasses.replace(Frozen(), t=<T>).t", "getattr(<O>, 't')", "net.layers[<I> % 2](<T>)", *(f"{h}(<T>, <I>)" for h in self.helpers),
            *(f"{h}(<T>, n=<I>)" for h in self.helpers),
        )  # fmt: skip

    def expr_I(self, e: Callable[[str], str], scope: Scope) -> str:
        tensor = "int(<T>.sum().item() > 0)" if self.breaks else "<T>.numel()"
        return self.fill(
                e,
            "(<I> + <I>) % 11", "(<I> * 2)", "(<I> - 1)", "(<I> // 2)", str(self.rng.randrange(5)), str(self.rng.randrange(-3, 9)), "max(<I>, <I>)",
            "len(<L>)", "sum(<L>)", "<T>.shape[-1]", "<T>.dim()", "int(<B>)", "len(<S>)", "divmod(<I>, 3)[1]", "abs(<I>)",
            "<D>.get(<S>, 0)", "([0] + <L>)[-1]", "<O>.value", "fails(<I> % 4)", "(<I> if <B> else <I>)", "math.floor(<F>)", tensor,
            "sum(z for z in <L> if z > <I>)", "len(set(<L>))", "variadic(<I>, *<L>, c=<I>)", "variadic(<I>, b=<I>, z=<I>)",
            "sum(counter(<I> % 4))", "bisect.bisect([1, 3, 5], <I>)", "Color.BLUE.value", "min(<L>, default=0)", "<L>.count(<I>)",
            "(lambda z, w=1: z + w)(<I>)", "round(<F>)", "int(str(<I>))", "<O>.twice", "hash(<I>) % 7", "zlib.crc32(<S>.encode()) % 5",
        )  # fmt: skip

    def expr_F(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "(<F> * 2)", "float(<I>)", "(<F> + <I>)", "(<I> / 4)", "math.sqrt(abs(<F>))", "abs(<F>)", "random.random()", "max(<F>, 0.1)")  # fmt: skip

    def expr_B(self, e: Callable[[str], str], scope: Scope) -> str:
        op = self.pick("<", "<=", "==", "!=", ">")
        tensor = "bool(<T>.sum() > 0)" if self.breaks else "(<T>.dim() > 1)"
        return self.fill(
                e,
            f"(<I> {op} <I>)", "(not <B>)", "(<B> and <B>)", "(<B> or <B>)", "(<S> == <S>)", "(<I> in <L>)", "(<S> in <D>)",
            "isinstance(<O>, Sub)", "hasattr(<O>, 'extra')", "bool(<L>)", "any(z > 1 for z in <L>)", "all(<L>)", tensor, "(<T> is <T>)",
            "(<T>.dtype == torch.float32)", "callable(<C>)", "(<I> < <I> <= 4)", "<S>.startswith('a')", "(<O> is <O>)", "<T>.is_contiguous()",
            "(<T>.grad is None)", "<T>.is_leaf", "torch.is_autocast_enabled('cpu')", "(type(<O>) is Box)", "torch.are_deterministic_algorithms_enabled()", "(torch.get_num_threads() > 1)",
            "(<T>.device.type == 'cpu')", "(<T>.shape == <T>.shape)",
        )  # fmt: skip

    def expr_S(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "f'{<I>}'", "(<S> + 'z')[:6]", "str(<B>)", "<S>.upper()", "'-'.join(map(str, <L>))[:9]", "type(<O>).__name__", "'%d' % <I>", "<S>[::-1]", "str(x.dtype)", "'{}'.format(<I>)", "Color(1).name", "f'{<F>:.2f}'")  # fmt: skip

    def expr_L(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(
                e,
            "[z * 2 for z in <L>]", "[*<L>, <I>][-6:]", "sorted(<L>, key=lambda z: -z)", "list(range(<I> % 5))", "<L>[1:]", "list(x.shape)", "[<I>, <I>]",
            "[z + w for z in <L> for w in range(2) if z][:6]", "list(reversed(<L>))", "list(itertools.accumulate(<L>))", "[i for i, _ in enumerate(<L>)]",
            "list(map(lambda z: z % 3, <L>))", "list(filter(None, <L>))", "[z for pair in zip(<L>, <L>) for z in pair][:6]", "list(<L>)", "<L>.copy()", "[len(z) for z in <D>]",
            "list(itertools.islice(itertools.count(<I>), 3))", "sorted(set(<L>))", "list(counter(<I> % 3))", "Items(<L>)", "list(dict.fromkeys(<L>))", "list(collections.Counter(<L>).values())",
        )  # fmt: skip

    def expr_D(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "{<S>: <I>}", "dict(<D>, k=<I>)", "{**<D>, 'z': <I>}", "{str(z): z for z in <L>}", "Table(a=<I>)", "(<D> | {'m': 1})", "collections.OrderedDict(<D>)", "collections.defaultdict(int, <D>)", "dict(zip('abc', <L>))")  # fmt: skip

    def expr_O(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "Box(<I>, <T>)", "Sub(<I>, <T>)", "Box.make(<I>)", "(<O> + <I>)", "<O>.push(<I>)", "copy.copy(<O>)", "(<O> if <B> else <O>)")  # fmt: skip

    def expr_C(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "(lambda z: z + <I>)", "functools.partial(torch.mul, <T>)", "adder(<T>)", "<O>.scale", "(lambda z, k=<F>: z * k)", "net", "nn.functional.silu", "net.layers[<I> % 2]")  # fmt: skip

    # ---- statements ----

    def block(self, scope: Scope, budget: int) -> list[str]:
        lines: list[str] = []
        for _ in range(max(1, budget)):
            lines += self.statement(scope, budget)
        return lines

    def body(self, scope: Scope, budget: int) -> list[str]:
        saved = {kind: list(names) for kind, names in scope.names.items()}
        lines = [INDENT + line for line in self.block(scope, max(1, budget // 2))]
        if scope.depth:  # names bound in a block are mostly not relied on behind it
            scope.names = saved
        return lines

    def statement(self, scope: Scope, budget: int) -> list[str]:
        r = self.rng.random()
        if budget > 1 and scope.depth < 6 and r < 0.38:
            make = self.rng.choice(
                [
                    self.if_,
                    self.if_,
                    self.for_,
                    self.for_,
                    self.while_,
                    self.try_,
                    self.try_,
                    self.with_,
                    self.with_,
                    self.function_,
                    self.match_,
                    self.comprehend_,
                ]
            )
            scope.depth += 1
            try:
                return make(scope, budget)
            finally:
                scope.depth -= 1
        return self.simple(scope)

    def simple(self, scope: Scope) -> list[str]:
        e = lambda kind: self.expr(kind, scope)
        r = self.rng.random()
        if r < 0.42:
            kind = self.rng.choices(list(NAMES), [8, 4, 2, 2, 1, 3, 2, 2, 2])[0]
            text = e(kind)
            return [f"{self.bind(kind, self.name(kind, scope), scope)} = {text}"]
        if r < 0.62:
            return [self.mutation(e, scope)]
        if r < 0.7:
            kind = self.rng.choice("TIFL")
            if not scope.names[kind]:
                text = e(kind)
                return [f"{self.bind(kind, self.name(kind, scope), scope)} = {text}"]
            target = self.rng.choice(scope.names[kind])
            return [f"{target} {self.pick('+=', '*=', '-=') if kind != 'L' else '+='} {e(kind)}"]
        if r < 0.77:
            return [self.fill(e, "G_N = <I>", "G_N += 1", "G_T = <T>", "G_FLAG = <B>", "G_L = <L>", "G_BOX = box")]
        if r < 0.82 and self.breaks:
            return [
                self.fill(
                    e,
                    "print(<I>, <S>)",
                    "magneto.graph_break()",
                    "shows(<S>)",
                    "zlib.crc32(b'abc')",
                    "print(<T>.shape)",
                    "repr(<O>.value)",
                    "random.shuffle([1, 2])",
                )
            ]
        if r < 0.86:
            return self.leave(e, scope)
        return self.unusual(e, scope)

    def leave(self, e: Callable[[str], str], scope: Scope) -> list[str]:
        condition = e("B")
        options = ["return <T>", "return <T>, <I>", "raise ValueError(<S>)", "raise Oops(<S>, <I>)", "return <O>", "return items"]
        if scope.loop:
            options += ["break", "continue"] * 3
        return [f"if {condition}:", INDENT + self.fill(e, *options)]

    def mutation(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(
            e,
            "box.value = <I> % 9", "box.value += 1", "box.t = <T>", "box.log.append(<I>)", "box.twice = <I>", "box.extra = <S>", "items.append(<T>)", "items[0] = <T>", "items[<I> % 2] = <T>",
            "table[<S>] = <I>", "table.update(k=<I>)", "table.setdefault('a', <I>)", "net.scale = <F>", "net.calls += 1", "net.cache['c'] = <T>", "net.mode = <S>", "net.steps.add_(1)",
            "x.add_(<I>)", "x[0] = <T>", "x[:, 1] += <I>", "x.mul_(<F>)", "<T>.add_(1)", "<T>[0] = <I>", "x.view(-1)[0] = <I>", "x.t()[0].mul_(2)",
            "x.detach().add_(1)", "y.copy_(<T>)", "G_L.append(<I>)", "G_D['g'] = <I>", "<L>.append(<I>)", "<O>.value = <I> % 5", "Box.shared.append(<I> % 4)", "Box.kind = <S>",
            "setattr(box, 'dyn', <I>)", "y.fill_(<I>)", "torch.add(<T>, <T>, out=G_T)", "y.zero_()", "box.log.clear()", "items.reverse()", "items.pop()", "net.register_buffer('more', <T>)", "x.data.add_(1)",
            "net.weight.data.mul_(0.5)", "table.pop('k', None)", "vars(box)['viadict'] = <I>", "x.unsqueeze_(0)", "y.requires_grad_()", "y.detach_()", "x.data = <T>", "items.sort(key=lambda z: z.dim())",
        )  # fmt: skip

    def unusual(self, e: Callable[[str], str], scope: Scope) -> list[str]:
        """Several lines that belong together. What is read is chosen before the names that are written."""
        self.fresh += 1
        it = f"it{self.fresh}"
        deletable = [name for kind in NAMES for name in scope.names[kind]] if scope.depth == 0 and not scope.parent else []
        options = [
            ["<=T>, <=T> = <T>, <T>"],
            ["<=I>, *<=L> = [0, *<L>]"],
            ["assert <B> or n < 9, <S>"],
            ["if (<=I> := <I>) > 1:", INDENT + "box.extra = <T>"],
            [f"{it} = adder(<I>)", f"<=I> = {it}(<I>) + {it}(1)"],
            [f"{it} = both(<T>)", f"<=T> = next({it})", f"<=T> = next({it}, None)"],
            [f"{it} = Point(<I>, <T>)", f"{it}.tags.append({it}.x)", f"<=I> = {it}.x + len({it}.tags)"],
            [f"{it} = counter(<I> % 4 + 1)", f"<=I> = next({it}, 0)", f"{it}.send(<I>)", f"{it}.close()"],
            ["with torch.no_grad():", INDENT + "<T>.add_(<F>)"],
            [f"{it} = collections.deque([1, 2], maxlen=3)", f"{it}.append(<I>)", f"<=L> = list({it})"],
            [f"class Local{it}(Box):", INDENT + "kind = <S>", f"<=O> = Local{it}(<I>, <T>)"],
            [f"{it} = net.register_forward_hook(lambda m, a, out: out * <F>)", "<=T> = net(<T>)", f"{it}.remove()"],
            ["net.train(<B>)"],
            ["<=T> = torch.rand(4) * random.random()"],
            [f"{it} = Slotted(<I>)", f"{it}.b = <T>", f"<=T> = {it}.b * {it}.a", f"del {it}.b"],
        ]
        if deletable and self.chance(0.1):
            name = self.rng.choice(deletable)
            for names in scope.names.values():
                names[:] = [other for other in names if other != name]
            return [f"del {name}"]
        lines = [re.sub("<([A-Z])>", lambda found: e(found[1]), line) for line in self.rng.choice(options)]
        return [re.sub("<=([A-Z])>", lambda found: self.bind(found[1], self.name(found[1], scope), scope), line) for line in lines]

    # ---- compound statements ----

    def if_(self, scope: Scope, budget: int) -> list[str]:
        condition = (
            f"{self.expr('T', scope)}.sum() > {self.rng.randrange(3)}" if self.breaks and self.chance(0.2) else self.expr("B", scope)
        )
        lines = [f"if {condition}:", *self.body(scope, budget)]
        if self.chance(0.3):
            lines += [f"elif {self.expr('B', scope)}:", *self.body(scope, budget)]
        if self.chance(0.5):
            lines += ["else:", *self.body(scope, budget)]
        return lines

    def loop_body(self, scope: Scope, budget: int) -> list[str]:
        outer, scope.loop = scope.loop, True
        lines = self.body(scope, budget)
        scope.loop = outer
        return lines

    def for_(self, scope: Scope, budget: int) -> list[str]:
        e = lambda kind: self.expr(kind, scope)
        kind, target, source = self.rng.choice(
            [
                ("I", "{}", f"range({e('I')} % 4)"), ("I", "{}", f"{e('L')}[:4]"), ("T", "{}", "items[:9]"), ("T", "{}", f"{e('T')}.reshape(-1)[:3]"), ("I", "{}, _k", f"enumerate({e('L')}[:3])"),
                ("T", "_k, {}", f"zip({e('L')}, items)"), ("I", "_k, {}", f"list({e('D')}.items())[:3]"), ("T", "{}", "pieces(x)"), ("T", "{}", "[x, y]"), ("I", "{}", "counter(3)"),
                ("T", "{}", "(z * 2 for z in items)"), ("I", "{}, _k", f"itertools.product(range(2), {e('L')}[:2])"), ("T", "{}", "x"), ("T", "{}", "net.parameters()"), ("T", "_k, {}", "net.named_buffers()"),
            ]
        )  # fmt: skip
        saved = {kind: list(names) for kind, names in scope.names.items()}
        name = self.bind(kind, self.name(kind, scope), scope)
        lines = [f"for {target.format(name)} in {source}:", *self.loop_body(scope, budget)]
        scope.names = {kind: [other for other in names if other != name] for kind, names in saved.items()}  # there may be no iteration
        if self.chance(0.2):
            lines += ["else:", *self.body(scope, budget)]
        return lines

    def while_(self, scope: Scope, budget: int) -> list[str]:
        self.fresh += 1
        left = f"left{self.fresh}"
        lines = [
            f"{left} = {self.rng.randrange(1, 4)}",
            f"while {left} > 0 and {self.expr('B', scope)}:",
            INDENT + f"{left} -= 1",
            *self.loop_body(scope, budget),
        ]
        if self.chance(0.2):
            lines += ["else:", *self.body(scope, budget)]
        return lines

    def try_(self, scope: Scope, budget: int) -> list[str]:
        raising = self.pick(
            f"fails({self.expr('I', scope)})", "raise Oops('here', 3)", "table['missing']", f"raise KeyError({self.expr('S', scope)})", "items[99]", f"{self.expr('T', scope)}.view(7)", "1 // 0", "box.nothing", "next(iter([]))", "pass",
            f"assert {self.expr('B', scope)}",
        )  # fmt: skip
        lines = ["try:", *self.body(scope, budget)]
        if self.chance(0.7):
            lines.append(INDENT + (raising if self.chance(0.6) else f"if {self.expr('B', scope)}: {raising}"))
            if self.chance(0.3):
                lines += self.body(scope, 1)
        handlers = self.rng.sample(
            [
                "Oops as err",
                "KeyError",
                "(ValueError, IndexError) as err",
                "Exception as err",
                "RuntimeError",
                "ZeroDivisionError",
                "AttributeError",
            ],
            self.rng.randrange(0, 3),
        )
        handlers.sort(key=lambda h: h.startswith("Exception"))
        for handler in handlers:
            lines += [f"except {handler}:", *self.body(scope, budget)]
            if handler.endswith("err") and self.chance(0.4):
                lines.append(
                    INDENT
                    + self.pick(
                        "box.log.append(str(err)[:20])",
                        "box.log.append(type(err).__name__)",
                        "raise",
                        "raise Oops('again') from err",
                        "raise ValueError(str(err)[:9])",
                        "items.append(err.args)",
                    )
                )
        if handlers and self.chance(0.25):
            lines += ["else:", *self.body(scope, budget)]
        if not handlers or self.chance(0.35):
            outer, scope.loop = scope.loop, False
            lines += ["finally:", *self.body(scope, budget)]
            scope.loop = outer
        return lines

    def with_(self, scope: Scope, budget: int) -> list[str]:
        manager = self.pick(
            "torch.no_grad()", "torch.enable_grad()", "Scope(box)", "Scope(box, True)", f"managed(box, {self.rng.randrange(3)})", "contextlib.nullcontext()", "contextlib.suppress(Oops, ValueError)",
            f"torch.set_grad_enabled({self.expr('B', scope)})", "torch.autocast('cpu', dtype=torch.bfloat16)", "contextlib.ExitStack()", "torch.no_grad(), Scope(box)", f"torch.autocast('cpu', enabled={self.expr('B', scope)})", "torch.inference_mode()",
        )  # fmt: skip
        if manager.startswith(("Scope", "managed")) and self.chance(0.5):
            manager += f" as {self.bind('I', self.name('I', scope), scope)}"
        return [f"with {manager}:", *self.body(scope, budget)]

    def function_(self, scope: Scope, budget: int) -> list[str]:
        self.fresh += 1
        name = f"inner{self.fresh}"
        inner = Scope(scope, {"T": ["z"]})
        free = [v for kind in "IT" for v in scope.names[kind] if v not in "z"]
        lines = [f"def {name}(z, *, w={self.expr('I', scope)}):"]
        if free and self.chance(0.5) and scope.parent is None:
            chosen = self.rng.choice(free)
            lines += [INDENT + f"nonlocal {chosen}", INDENT + f"{chosen} = {self.expr('I' if chosen[0] in NAMES['I'] else 'T', scope, 1)}"]
        body = [INDENT + line for line in self.block(inner, min(3, budget // 2))]
        lines += body + [INDENT + f"return {self.expr('T', inner)}"]
        self.bind("C", name, scope)
        if self.chance(0.6):
            value = f"{name}({self.expr('T', scope)})"
            lines.append(f"{self.bind('T', self.name('T', scope), scope)} = {value}")
        return lines

    def match_(self, scope: Scope, budget: int) -> list[str]:
        subject, cases = self.rng.choice(
            [
                (self.expr("I", scope), ["0", "1 | 2", "z0 if z0 > 4"]),
                (self.expr("L", scope), ["[]", "[z0]", "[z0, *_]"]),
                (self.expr("O", scope), ["Sub()", "Box(value=0)", "Box(value=z0)"]),
                (self.expr("D", scope), ["{'a': 1}", "{'k': z0, **_r}", "{'a': z0}"]),
                (self.expr("S", scope), ["'abc' | 'box'", "str(z0)"]),
            ]
        )
        lines = [f"match {subject}:"]
        for case in self.rng.sample(cases, self.rng.randrange(1, len(cases) + 1)):
            lines += [INDENT + f"case {case}:", *(INDENT + line for line in self.body(scope, budget))]
        if self.chance(0.5):
            lines += [INDENT + "case _:", *(INDENT + line for line in self.body(scope, budget))]
        return lines

    def comprehend_(self, scope: Scope, budget: int) -> list[str]:
        e = lambda kind: self.expr(kind, scope)
        text = self.pick(
            f"[{e('C')}(z) for z in items]",
            f"[z * {e('I')} for z in items if z.dim() > {self.rng.randrange(2)}]",
            f"[z.sum() for z in (x, {e('T')})]",
            f"list({{k: x * v for k, v in enumerate({e('L')}[:3])}}.values())",
        )
        self.fresh += 1
        ts, other = f"ts{self.fresh}", e("T")
        return [f"{ts} = {text}", f"{self.bind('T', self.name('T', scope), scope)} = {ts}[0] if {ts} else {other}"]

    # ---- the whole ----

    def main(self) -> str:
        parts, self.helpers = [], []
        for i in range(self.rng.randrange(3)):
            scope = Scope(params={"T": ["z"], "I": ["n"]})
            outer = Scope()
            body = [*self.block(scope, self.size // 2), f"return {self.expr('T', scope)}"]
            parts.append(
                self.define(
                    f"helper{i}",
                    "z, n=1",
                    ["x = y = z", "flag = n > 1", "mode = 'abc'", "box, net, items, table = G_BOX, G_NET, [z], {}", *body],
                )
            )
            self.helpers.append(f"helper{i}")
        scope = Scope()
        results = [
            f"return {self.expr('T', scope)}",
            "return x, y, items",
            f"return {{'t': {self.expr('T', scope)}, 'n': {self.expr('I', scope)}}}",
            f"return [{self.expr('T', scope)}, box]",
            "",
        ]
        body = [*self.block(scope, self.size), self.rng.choice(results) or "pass"]
        parts.append(self.define("main", "x, y, n, flag, mode, box, net, items, table", body))
        return "\n\n".join(parts)

    def define(self, name: str, params: str, body: list[str]) -> str:
        written = sorted(
            {
                word
                for line in body
                for word in ("G_N", "G_T", "G_FLAG", "G_L", "G_BOX")
                if line.strip().startswith((f"{word} =", f"{word} +="))
            }
        )
        head = [f"global {', '.join(written)}"] if written else []
        return "\n".join([f"def {name}({params}):", *(INDENT + line for line in head + body)])

    def setup(self) -> str:
        return "\n".join(
            [
                f"G_N = {self.rng.randrange(4)}", f"G_F = {self.rng.choice([0.5, 2.0, -1.0])}", f"G_FLAG = {self.rng.choice([True, False])}", "G_T = torch.linspace(0, 1, 4)", f"G_L = [3, 1, {self.rng.randrange(4)}]",
                "G_D = {'a': 1, 'abc': 2}", "G_BOX = Box(2, torch.ones(4))", f"G_FN = {self.pick('torch.cos', 'adder(1)', 'lambda z: z * G_N', 'Box.plain')}", "net = Net()", "G_NET = net" if self.chance(0.5) else "G_NET = Net()",
                f"net.train({self.rng.choice([True, False])})", "x = torch.arange(12.0).reshape(3, 4) / 5 - 1", f"y = {self.pick('torch.ones(4)', 'x', 'x[1]', 'x.view(4, 3).t()', 'torch.linspace(-1, 1, 4)', 'x.t().contiguous().t()')}",
                f"n = {self.rng.randrange(4)}", f"flag = {self.rng.choice([True, False])}", f"mode = {self.pick(repr('abc'), repr('both'), repr('cached'))}", f"box = {self.pick('Box', 'Sub')}({self.rng.randrange(4)}, {self.pick('torch.ones(4)', 'x', 'y')})",
                f"items = [{self.pick('x', 'y', 'torch.ones(3, 4)')}, torch.zeros(4)]", f"table = {self.pick('{}', 'Table(b=2)', repr({'a': 1, 'k': 2}))}", *(["x.requires_grad_()"] if self.chance(0.15) else []),
            ]
        )  # fmt: skip

    def step(self) -> str:
        return self.pick(
            "G_N = G_N + 1", "G_N = 0", "G_F = 3.0", "G_FLAG = not G_FLAG", "G_T = torch.ones(4) * 2", "G_T = G_T.double()", "G_L.append(5)", "G_L = [1]", "G_D['abc'] = 7", "G_D = {}", "G_BOX = Sub(1, torch.zeros(4))", "G_FN = torch.tanh",
            "G_FN = adder(5)", "box.value += 1", "box.value = 0", "box.t = torch.zeros(3, 4)", "box.t = x", "box.extra = 1", "box.log.append(9)", "box = Sub(3, x)", "box.__class__ = Sub", "Box.scale = lambda self, z: z + self.value",
            "Box.kind = 'crate'", "Box.shared = [4]", "box.scale = lambda z: z - 1", "Sub.twice = 7", "Box.plain = staticmethod(lambda z: z * 5)", "net.scale = 2.0", "net.mode = 'cached'", "net.mode = 'abc'", "net.train(not net.training)", "net.layers[0].weight.data.mul_(2)",
            "net.layers[0].weight.requires_grad_(False)", "net.layers.append(nn.Linear(4, 4))", "net.layers[1] = nn.Identity()", "net.act = nn.ReLU()", "net.weight = nn.Parameter(torch.eye(4))", "net.double()", "net.float()", "net.register_forward_hook(lambda m, a, out: out + 1)",
            "net.layers[0].register_forward_pre_hook(lambda m, a: (a[0] * 2,))", "net.layers[1].register_full_backward_hook(lambda m, gi, go: None)", "net.forward = lambda z, n=1: z * n", "Net.forward = lambda self, z, n=1: z + n", "net._forward_hooks.clear()", "del net.bias; net.bias = None",
            "net.weight.data = torch.ones(4, 4)", "net.requires_grad_(False)", "net.act[1].p = 0.0", "x = x.detach().double()", "x = torch.ones(3, 4)", "x = torch.ones(5, 4)", "x = torch.ones(4, 3).t()", "x = torch.ones(3, 4, requires_grad=True)", "x = x.detach().clone().requires_grad_()", "x = nn.Parameter(torch.ones(3, 4))",
            "x = torch.arange(12).reshape(3, 4)", "x = torch.ones(3, 4).to(torch.bfloat16)", "x = torch.zeros(3, 4)[::1].neg()", "y = x", "y = x[0]", "y = torch.ones(3, 4)", "y = torch.ones(())", "y = x.detach()", "x = torch.ones(1, 4).expand(3, 4)", "n += 1", "n = -1", "n = 2.5", "n = True",
            "flag = not flag", "flag = 1", "mode = 'both'", "mode = Named('abc')", "mode = 'abcabc'", "items.append(x)", "items = [y]", "items = Items([x, y])", "items = (x, y)", "items = []", "table['k'] = 3", "table = collections.OrderedDict(a=5)", "table = {'k': 1}", "table.clear()",
            "torch.set_grad_enabled(False)", "torch.set_grad_enabled(True)", "torch.set_default_dtype(torch.float64)", "torch.set_default_dtype(torch.float32)", "torch.use_deterministic_algorithms(True, warn_only=True)", "torch.set_num_threads(2)", "torch.set_autocast_enabled('cpu', True)", "torch.set_autocast_enabled('cpu', False)",
            "fails = lambda k: k", "shows = len", "apply = lambda f, *a, **k: f(*a, **k) * 2", "counter = lambda k: range(k)", "variadic.__defaults__ = (5,)", "variadic.__kwdefaults__ = {'c': 9}", "fails.__code__ = (lambda n: n * 3).__code__", "adder = lambda s: (lambda v: s)", "math = __import__('cmath')", "torch.manual_seed(5)", "len = lambda v: 3",
            "Scope.__exit__ = lambda self, *a: True", "Table.__missing__ = lambda self, k: 1", "Point.__init__ = lambda self, x, y=None: (setattr(self, 'x', 1), setattr(self, 'y', y), setattr(self, 'tags', []))[0]", "x.grad = torch.ones_like(x) if x.is_floating_point() else None", "x.add_(1) if not x.requires_grad else None", "x.some = 3", "x.data = torch.zeros(3, 4)",
        )  # fmt: skip

    def case(self, seed: int, backend: str) -> Case:
        program = self.main()
        while not compiles(program):  # `nonlocal` of a parameter and the like
            program = self.main()
        setup = self.setup()
        call = "out = entry(x, y, n, flag, mode, box, net, items, table)"
        steps = [call]
        for _ in range(self.rng.randrange(3, 8)):
            steps += [self.step() for _ in range(self.rng.choice([0, 1, 1, 1, 2]))]
            steps.append(call)
            if self.chance(0.15):
                steps.append("backward(out)")
        return Case(seed, program, setup, tuple(steps), backend)


def compiles(text: str) -> bool:
    try:
        compile(text, "<candidate>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def case_of(seed: int) -> Case:
    """The case of a seed: one in twelve runs under aot_eager, one in forty under inductor, the others under eager."""
    choice = random.Random(seed * 7919 + 1).random()
    backend = "inductor" if choice < 0.025 else "aot_eager" if choice < 0.1 else "eager"
    return Generator(seed).case(seed, backend)
