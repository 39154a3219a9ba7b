"""Random whole programs from a seed: functions over ints, strings, containers, objects, modules and tensors, and a scenario that calls them.

A `Case` is text only: the program (executed behind the prelude), the statements that make its arguments, and a list of steps. A step is one
statement executed in the program's namespace: a change of the environment, or a call of `entry` (the plain or the optimised `main`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.idioms import idioms

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
        "(callable(net) or magneto.is_compiling())",
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
                "(<a>.as_subclass(Tagged) * <F>).as_subclass(torch.Tensor)", "<a>.unique().sum()", "<a>.nonzero().sum()", "<a>.index_select(0, torch.tensor([0]))[0]", "<a>.split(2, -1)[-1].sum()", "<a>.flatten().unfold(0, 2, 2).sum()",
                "torch.tensor(<a>.tolist()).sum()", "torch.as_tensor(<a>.detach().numpy() * 2)", "torch.einsum('...i->...', <a>)", "<a>.mT", "<a>.T", "<a>.real", "<a>.roll(1)", "<a>.index_fill(0, torch.tensor([0]), <F>)", "<a>.addcmul(<a>, <a>)", "<a>.lerp(<a>, 0.5)", "<a>[<a> > 0]", "<a>.nonzero().float()", "[*<a>][0]", "list(<a>)[-1]", "<a>.unique()", "torch.from_numpy(G_ARR)", "next(G_PIECES, <a>)",
                "<a>[torch.tensor([0, -1])]", "<a>[None, ..., None].sum(0)", "<a>[..., torch.tensor([1, 0])]", "<a>[::2]", "<a>.gather(-1, torch.zeros_like(<a>, dtype=torch.long))", "<a>.scatter(-1, torch.zeros(<a>.shape, dtype=torch.long), 2.0)", "<a>.index_put((torch.tensor([0]),), torch.tensor(1.0))", "torch.tril(<a>)", "<a>.flip(0)", "<a>.diff(dim=-1)", "<a>.topk(1)[0]", "<a>.std(-1)", "<a>.norm()",
                "<a>.to(torch.bfloat16)", "<a>.int()", "<a>.to(torch.complex64).abs()", "torch.view_as_real(torch.complex(<a>, <a>))[..., 0]", "<a>.logsumexp(-1)", "torch.addmm(x, x, net.weight)", "<a>.argsort(-1).float()", "torch.add(Duck(<a>), <F>).t", "torch.repeat_interleave(<a>, 2, 0)[::2]", "<a>.movedim(0, -1)", "<a>.tensor_split(2)[0]", "F.cross_entropy(x, torch.zeros(3, dtype=torch.long)) + <a>.sum()", "F.one_hot(torch.tensor(1), 4) * <a>", "pickle.loads(pickle.dumps(<a>.detach()))",
            )  # fmt: skip
        if r < 0.68:
            return self.fill(
                e,
                "torch.where(<T> > 0, <T>, <T>)", "torch.full((4,), <F>)", "torch.arange(4.0)", "torch.rand(4)", "torch.tensor(<F>)",
                "F.dropout(<T>, 0.5, <B>)", "torch.cat([<T>.reshape(-1), <T>.reshape(-1)])[:4]", "torch.stack([<T>, <T>]).sum(0)",
                "torch.zeros(4, dtype=torch.get_default_dtype())", "F.linear(<T>, net.weight)", "torch.tensor(<L>).sum() * 1.0", "torch.randn_like(x)",
                "torch.ones(<I> % 4 + 1).sum()", "torch.matmul(<T>, net.weight)", "x.new_ones(4)",
                "torch.from_numpy(np.arange(4, dtype=np.float32)) * <T>", "np.add(<T>.detach().numpy(), <F>).sum() + torch.zeros(())", "torch.ones(x.shape + (<I> % 3 + 1,)).sum()", "nn.Parameter(torch.ones(4) * <I>)", "torch.empty_like(<T>).fill_(<F>)",
                "torch.func.vmap(torch.sin)(<T>)", "torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1]", "torch.func.vmap(torch.mul, in_dims=(0, None))(x, <F>)", "torch.func.grad_and_value(lambda z: z.pow(2).sum())(<T>)[0]", "torch.normal(0.0, 1.0, (4,))", "torch.randperm(4).float()", "torch.utils.checkpoint.checkpoint(net.layers[0], <T>, use_reentrant=False)", "outside(<T>)", "outside(<T>, <I>)", "G_PARTS(<T>)", "G_PARTS(<T>, <I>)", "G_PARTS.named['a'](<T>)", "G_PARTS.listed[<I> % 2] * <T>", "copy.deepcopy(G_PARTS)(x)", "torch.func.grad(lambda z: (z * <F>).sum())(<T>)", "torch.func.functional_call(net.layers[0], {'weight': net.weight, 'bias': net.bias}, (<T>,))", "checkpoint(torch.sin, <T>, use_reentrant=False)",
                "torch.linspace(0, 1, <I> % 4 + 1).sum()", "torch.outer(<T>.reshape(-1)[:2], <T>.reshape(-1)[:4])[0]", "torch.bernoulli(torch.full((4,), 0.5))", "F.scaled_dot_product_attention(x[None], x[None], x[None])[0]",
            )  # fmt: skip
        return self.fill(
                e,
            "(<T> if <B> else <T>)", "net(<T>)", "net(<T>, <I>)", "<O>.scale(<T>)", "<O>(<T>)", "<C>(<T>)",
            "apply(<C>, <T>)", "sum([<T>, <T>])", "functools.reduce(operator.add, [<T>, <T>])", "(lambda z: z * 2)(<T>)",
            "sum(z.sum() for z in items)", "list(map(<C>, [<T>, <T>]))[<I> % 2]", "next(pieces(<T>))", "[*both(x)][<I> % 4]",
            "functools.partial(torch.add, <T>)(<T>)", "{'k': <T>}['k']", "(<T>, <T>)[<B>]", "copy.copy(<T>)",
            "Pair(<T>, <I>).left", "Row(<T>, n=<I>).scaled()", "Row(<T>)._replace(n=3).scaled()", "(<T> * Ranked(<I>))", "<T>[Ranked(<I>)]", "max([(1, <T>), (<I>, x)], key=lambda pair: pair[0])[1]", "next(filter(lambda z: z.dim() > 0, [<T>, x]))", "(lambda *ts: ts[-1])(*[<T>, <T>])", "functools.singledispatch(lambda z: z * 2)(<T>)", "type('Made', (Box,), {'kind': 'm'})(2, <T>).scale(<T>)", "operator.attrgetter('t')(<O>)", "Point(<I>, <T>).y", "Frozen(t=<T>).t", "Slotted(<T>).a", "Box.make(<I>).t",
            "dataclasses.replace(Frozen(), t=<T>).t", "getattr(<O>, 't')", "net.layers[<I> % 2](<T>)", "Doubled.apply(<T>, <I>)", "copy.deepcopy(<O>).t", "Output(t=<T>, n=<I>).t", "Output(a=<T>).to_tuple()[0]", "halved(<T>)", "halved(<T>, by=<I>)", "deep(<T>, <I> % 4)", "lib.widen(<T>)", "nested((<T>, [<T>]), torch.neg)[0]", "list(flat([<T>, {'k': (<T>,)}]))[1]", "G_CACHE.update(<T>, <T>)[0]", "G_CACHE.update(x, x, <I> % 2)[1]", "[k for k, _ in G_CACHE][0]",
            "G_FIXED.update(x[:1])", "G_FIXED.buffer[G_FIXED.at - 1]", "G_STACK(<T>)", "G_STACK[<I> % 2](<T>)", "G_STACK(<T>, n=<I>)", "[m for m in net.modules()][-1](<T>)", "next(iter(net.state_dict().values()))[0]", "dict(net.named_parameters())['weight'][0]", "(<T>.grad if <T>.grad is not None else <T>)", "functools.partial(halved, by=<I>)(<T>)", "operator.itemgetter(0)([<T>])", "operator.methodcaller('sin')(<T>)",
            *(f"{h}(<T>, <I>)" for h in self.helpers),
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
            "G_ADD(<I>) % 9", "memo(<I>)", "Ranked(<I>).n", "sum(Ranked(<I>))", "Ranked[<I>].n", "len({Ranked(<I>), Ranked(1)})", "[1, 2, 3][Ranked(<I>)]", "max(Ranked(<I>), Ranked(2)).n", "Level.HIGH + <I>", "Rights.READ.value", "First.rank", "len(Registered.known)", "heapq.nsmallest(1, [<I>, 3])[0]", "len(re.findall('a', <S>))", "sum(1 for _ in Countdown(<I> % 4))", "max(<L>, key=lambda z: -z, default=1)", "G_PARTS.seen", "len(list(G_PARTS.named_parameters()))", "int.from_bytes(bytes([<I> % 9]), 'big')", "sized(<I>)", "sized(<L>)", "sized(<S>)", "G_CACHE.size", "G_CACHE.seen", "G_CACHE.level", "len(Cache)", "G_FIXED.end", "lib.factor", "Tagged.used", "halved.calls", "len(inspect.signature(variadic).parameters)", "len(<S>.encode())", "int((<I> + 2j).imag)", "sum(range(<I>)[::2])", "len({<I>, <I>} | set(<L>))", "torch.Size([<I>, 2]).numel()", "len(<T>)", "int(<T>.sum()) % 7", "next(G_ITER, 0)", "next(G_COUNT, 5)", "<T>.detach().numpy().size", "<T>.argmax().item()", "len([*<T>])",
            "(x.shape + (<I>,))[-1]", "bytes([1, 2, 3])[<I> % 3]", "len(typing.get_args(typing.Union[int, str]))", "[*range(5)][slice(<I> % 3, None)][0]", "len(G_CACHE.by_name[<S>])", "math.prod(<L>)", "int(np.prod(x.shape))", "operator.index(<I>)", "(lambda *z, **w: len(z) + len(w))(*<L>, **{'a': <I>})", "functools.reduce(lambda a, b: a * 2 + b, <L>, <I>)", "next((z for z in <L> if z > <I>), -1)", "pow(<I>, 2, 7)", "<I>.bit_length()",
        )  # fmt: skip

    def expr_F(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "(<F> * 2)", "float(<I>)", "(<F> + <I>)", "(<I> / 4)", "math.sqrt(abs(<F>))", "abs(<F>)", "random.random()", "max(<F>, 0.1)", "float(<T>.sum())", "<T>.mean().item()", "float(G_ARR.sum())", "np.float32(<F>)", "np.float64(<F>)")  # fmt: skip

    def expr_B(self, e: Callable[[str], str], scope: Scope) -> str:
        op = self.pick("<", "<=", "==", "!=", ">")
        tensor = "bool(<T>.sum() > 0)" if self.breaks else "(<T>.dim() > 1)"
        return self.fill(
                e,
            f"(<I> {op} <I>)", "(not <B>)", "(<B> and <B>)", "(<B> or <B>)", "(<S> == <S>)", "(<I> in <L>)", "(<S> in <D>)",
            "isinstance(<O>, Sub)", "hasattr(<O>, 'extra')", "bool(<L>)", "any(z > 1 for z in <L>)", "all(<L>)", tensor, "(<T> is <T>)",
            "(<T>.dtype == torch.float32)", "callable(<C>)", "(<I> < <I> <= 4)", "<S>.startswith('a')", "(<O> is <O>)", "<T>.is_contiguous()",
            "(<T>.grad is None)", "<T>.is_leaf", "torch.is_autocast_enabled('cpu')", "(type(<O>) is Box)", "torch.are_deterministic_algorithms_enabled()", "(torch.get_num_threads() > 1)", "(Ranked(<I>) < Ranked(2))", "(Ranked(<I>) == Ranked(<I>))", "(Ranked(1) in [Ranked(<I>)])", "(Rights.READ in Rights.READ | Rights.WRITE)", "bool(re.match('a+', <S>))", "isinstance(Level(1), int)", "('weight' in net.state_dict())", "(<T>.dtype in (torch.float32, torch.float64))",
            "(<T>.device.type == 'cpu')", "(<T>.shape == <T>.shape)",
            "(<I> in G_CACHE)", "issubclass(type(<O>), Box)", "(id(<O>) == id(box))", "('value' in dir(<O>))", "('t' in vars(<O>))", "isinstance(<I>, (int, float))", "(<T> in [])", "(<S> < 'b')", "{1, 2} <= set(<L>)", "(lib.factor > <I>)", "(<F> != <F>)", "torch.is_inference_mode_enabled()", "isinstance(Color.RED, enum.Enum)", "(<T>.shape[-1:] == (4,))", "(net._forward_hooks != {})",
        )  # fmt: skip

    def expr_S(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "f'{<I>}'", "f'{Ranked(<I>):x}'", "re.sub('a', 'b', <S>)", "Level(1).name", "f'{<I>:>{4}}'", "<S>.title()", "' '.join(Registered.known)[:9]", "str(Rights.READ)", "(<S> + 'z')[:6]", "str(<B>)", "<S>.upper()", "'-'.join(map(str, <L>))[:9]", "type(<O>).__name__", "'%d' % <I>", "<S>[::-1]", "str(x.dtype)", "'{}'.format(<I>)", "Color(1).name", "f'{<F>:.2f}'", "repr(<L>)", "f'{<S>!r:>8}'", "<S>.replace('a', <S>)[:9]", "','.join(sorted(<D>))", "str(Pair(<I>, 2))", "halved.__name__", "repr(Point(<I>))[:20]", "str(torch.float32)", "'%s|%s' % (<S>, <I>)", "<S>.encode().decode()")  # fmt: skip

    def expr_L(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(
                e,
            "[z * 2 for z in <L>]", "[*<L>, <I>][-6:]", "sorted(<L>, key=lambda z: -z)", "list(range(<I> % 5))", "<L>[1:]", "list(x.shape)", "[<I>, <I>]",
            "[z + w for z in <L> for w in range(2) if z][:6]", "list(reversed(<L>))", "list(itertools.accumulate(<L>))", "[i for i, _ in enumerate(<L>)]",
            "list(map(lambda z: z % 3, <L>))", "list(filter(None, <L>))", "[z for pair in zip(<L>, <L>) for z in pair][:6]", "list(<L>)", "<L>.copy()", "[len(z) for z in <D>]",
            "list(itertools.islice(itertools.count(<I>), 3))", "sorted(set(<L>))", "list(counter(<I> % 3))", "Items(<L>)", "list(dict.fromkeys(<L>))", "list(collections.Counter(<L>).values())",
            "[z for z, _ in itertools.groupby(<L>)]", "list(itertools.chain(<L>, (<I>,)))", "[a for a, b in itertools.zip_longest(<L>, [1])]", "[*itertools.takewhile(lambda z: z < 3, <L>)]", "list(bytes(3))", "[int(z) for z in x.shape]", "[y for z in <L> if (y := z % 3)]", "list(flat([<L>, {'a': <I>}]))", "np.arange(<I> % 4).tolist()", "sorted(<L>, reverse=True)", "list(collections.deque(<L>, maxlen=2))",
        )  # fmt: skip

    def expr_D(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "{<S>: <I>}", "{k: v for k, v in zip('ab', <L>)}", "{**Row(None)._asdict(), 't': 1}", "dict.fromkeys(<S>, <I>)", "functools.reduce(lambda d, k: {**d, k: 1}, 'ab', <D>)", "dict(<D>, k=<I>)", "{**<D>, 'z': <I>}", "{str(z): z for z in <L>}", "Table(a=<I>)", "(<D> | {'m': 1})", "collections.OrderedDict(<D>)", "collections.defaultdict(int, <D>)", "dict(zip('abc', <L>))", "Output(a=<I>)", "dict(sorted(<D>.items()))", "{k: v for k, v in <D>.items() if v}", "copy.deepcopy(<D>)", "collections.ChainMap(<D>, {'q': 1})", "dataclasses.asdict(Frozen(<I>))", "types.MappingProxyType(<D>).copy()")  # fmt: skip

    def expr_O(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "Box(<I>, <T>)", "Sub(<I>, <T>)", "Box.make(<I>)", "(<O> + <I>)", "<O>.push(<I>)", "copy.copy(<O>)", "(<O> if <B> else <O>)", "copy.deepcopy(<O>)")  # fmt: skip

    def expr_C(self, e: Callable[[str], str], scope: Scope) -> str:
        return self.fill(e, "(lambda z: z + <I>)", "functools.partial(torch.mul, <T>)", "adder(<T>)", "<O>.scale", "(lambda z, k=<F>: z * k)", "net", "nn.functional.silu", "outside", "G_PARTS", "G_PARTS.chain", "G_PARTS.named['b']", "net.layers[<I> % 2]", "halved", "lib.widen", "G_ADD", "traced(torch.sin)", "functools.wraps(torch.cos)(lambda z: z - 1)", "operator.neg", "Doubled.apply", "G_STACK")  # fmt: skip

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
                    "LOG.warning('%s here', <I>)",
                    "warnings.warn('said: ' + <S>)",
                    "<T>.sum().item()",
                    "sorted(globals())",
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
            "G_CACHE.update(<T>, x)", "G_CACHE.level = <I> * 30", "G_CACHE.by_name[<S>].append(<I>)", "G_CACHE.keys.clear()", "G_FIXED.update(x[:2])", "G_FIXED.at = <I>", "lib.factor = <I>", "Tagged.used += 1", "box.__dict__.update(extra=<I>)", "delattr(box, 'extra')", "x.view(-1)[::2].mul_(2)", "x[x > 0] = <F>", "x.t().add_(<I>)",
            "x.chunk(2, -1)[0].zero_()", "x.select(0, 1).copy_(y)", "y.unsqueeze(0).add_(1)", "torch.nn.init.ones_(net.bias)", "net.layers[0].weight = net.weight", "net.bias.grad = None", "memo.cache_clear()", "random.seed(<I>)", "torch.manual_seed(<I>)", "items.insert(0, <T>)", "items.extend([<T>, <T>])", "items[:1] = [<T>]", "del items[-1]", "x.resize_(2, 2) if x.is_contiguous() and x.numel() > 3 else None", "x.swapaxes_(0, 1)", "net.to(torch.float64)", "net.zero_grad()", "G_PARTS.train(<B>)", "G_PARTS.norm.reset_running_stats()", "G_PARTS.named[<S>] = nn.Tanh()", "G_PARTS.listed.append(nn.Parameter(torch.ones(4)))", "x[torch.tensor([0])] = <F>", "x.index_put_((torch.tensor([0]),), torch.tensor(1.0))", "x.scatter_(-1, torch.zeros(x.shape, dtype=torch.long), <F>)", "torch.mul(x, <F>, out=x)", "y.grad = None", "Registered.known.append(<S>)", "First.rank = <I>", "x.data = x.data.clone()", "x.unbind(0)[0].mul_(<F>)", "x.diagonal().fill_(<F>)",
            "LOG.setLevel(<I> * 10)", "y.index_add_(0, torch.tensor([0]), y[:1])", "x.masked_fill_(x > 0, <F>)", "x.clamp_(max=<F>)", "G_STACK.append(nn.Tanh())", "setattr(net, 'extra', <T>)", "G_ARR[0] = <I>", "np.add(G_ARR, <I>, out=G_ARR)", "G_FIXED.buffer[<I>] = <T>", "x.t_()", "x.T.add_(1)",
        )  # fmt: skip

    def unusual(self, e: Callable[[str], str], scope: Scope) -> list[str]:
        """Several lines that belong together. What is read is chosen before the names that are written."""
        self.fresh += 1
        deletable = [name for kind in NAMES for name in scope.names[kind]] if scope.depth == 0 and not scope.parent else []
        if deletable and self.chance(0.1):
            name = self.rng.choice(deletable)
            for names in scope.names.values():
                names[:] = [other for other in names if other != name]
            return [f"del {name}"]
        lines = [re.sub("<([A-Z])>", lambda found: e(found[1]), line) for line in self.rng.choice(idioms(f"it{self.fresh}"))]
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
            f"torch.set_grad_enabled({self.expr('B', scope)})", "torch.autocast('cpu', dtype=torch.bfloat16)", "contextlib.ExitStack()", "torch.no_grad(), Scope(box)", f"torch.autocast('cpu', enabled={self.expr('B', scope)})", "torch.inference_mode()", "torch.autocast('cpu', dtype=torch.float16)",
            "contextlib.redirect_stdout(__import__('io').StringIO())", "torch.random.fork_rng()", "torch.autograd.set_detect_anomaly(False)", "contextlib.closing(counter(3))", "Scope(box), managed(box, 1)",
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
                (
                    f"Point({self.expr('I', scope)}, {self.expr('T', scope)})",
                    ["Point(0, _)", "Point(x=1 | 2 as z0)", "Point(y=torch.Tensor()) if flag"],
                ),
                (f"Pair({self.expr('I', scope)}, {self.expr('S', scope)})", ["(0, _)", "Pair(left=z0, right='abc')", "[1, str()]"]),
                (f"[{self.expr('L', scope)}, {self.expr('D', scope)}]", ["[[z0, *_], {'a': 1}]", "[[], dict()]", "[list() as z0, _]"]),
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
                "G_D = {'a': 1, 'abc': 2}", "G_ADD = adder(1)", "G_CACHE = Cache()", "G_FIXED = Fixed()", "G_ITER = iter(range(9))", "G_COUNT = counter(4)", "G_PIECES = pieces(torch.ones(3, 4))", "G_ARR = np.ones((3, 4), dtype=np.float32)", "G_STACK = Stack(nn.Linear(4, 4), nn.Tanh())", "G_PARTS = Parts()", "G_BOX = Box(2, torch.ones(4))", f"G_FN = {self.pick('torch.cos', 'adder(1)', 'lambda z: z * G_N', 'Box.plain')}", "net = Net()", "G_HANDLE = net.register_forward_hook(lambda m, a, out: out * 2)" if self.chance(0.2) else "G_HANDLE = None", "G_NET = net" if self.chance(0.5) else "G_NET = Net()",
                f"net.train({self.rng.choice([True, False])})", "G_OPT = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)", "x = torch.arange(12.0).reshape(3, 4) / 5 - 1", f"y = {self.pick('torch.ones(4)', 'x', 'x[1]', 'x.view(4, 3).t()', 'torch.linspace(-1, 1, 4)', 'x.t().contiguous().t()')}",
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
            "G_ADD.__closure__[0].cell_contents = 4", "G_ADD.__closure__[1].cell_contents = 6", "G_ADD(2)", "G_ADD = adder(2.5)", "G_FN.__closure__[0].cell_contents = 3", "G_HANDLE.remove()", "G_HANDLE = net.register_forward_hook(lambda m, a, out: -out)", "G_HANDLE = net.act.register_forward_pre_hook(lambda m, a: (a[0] - 1,))", "G_CACHE = Cache(2)", "G_CACHE.keys.append(x)", "G_CACHE.level = 3",
            "G_CACHE.by_name['abc'].append(1)", "G_CACHE.__dict__['size'] = 1", "Cache.made = 50", "Cache.update = lambda self, k, v, layer=0: (v, k)", "G_FIXED = Fixed(3)", "G_FIXED.at = 0", "G_FIXED.buffer = torch.ones(6, 4)", "lib.factor = 5", "lib.factor = 0.5", "lib.widen = torch.neg", "lib.extra = 1", "Tagged.used = 0", "Tagged.__torch_function__ = torch._C._disabled_torch_function_impl",
            "G_STACK = Stack(nn.Tanh(), nn.ReLU())", "G_STACK.add_module('last', nn.Sigmoid())", "del G_STACK[0]", "G_STACK[0] = nn.Identity()", "memo = lambda k: 2", "memo.cache_clear()", "sized.register(str, lambda v: 30)", "halved.calls = 100", "halved = traced(torch.neg)", "halved.__wrapped__ = None", "LOG.setLevel(40)", "LOG.disabled = True", "LOG.handlers.clear()", "Meta.__len__ = lambda cls: 8", "Checked.__get__ = lambda self, obj, owner=None: 11",
            "Output.__getattr__ = lambda self, name: 3", "Doubled.backward = staticmethod(lambda ctx, g: (g * 5, None))", "Doubled.forward = staticmethod(lambda ctx, z, factor=2: z - factor)", "deep = lambda z, n: z - n", "nested = lambda tree, fn: tree", "torch.set_autocast_dtype('cpu', torch.float16)", "torch.set_autocast_dtype('cpu', torch.bfloat16)", "torch.use_deterministic_algorithms(False)", "torch.set_num_threads(1)", "random.seed(3)",
            "net.layers[0].bias = None", "net.layers[0].weight = nn.Parameter(torch.ones(4, 4))", "net.layers[0].to(torch.bfloat16)", "net.half()", "net.bias.requires_grad_(not net.bias.requires_grad)", "net.layers.pop(-1)", "net.layers.insert(0, nn.Linear(4, 4))", "net.extra = nn.Linear(4, 4)", "net.register_buffer('steps', torch.ones(()))", "net.steps = torch.ones(2)", "net.cache['c'] = x", "net.cache.clear()", "net.load_state_dict(copy.deepcopy(net.state_dict()))", "net = copy.deepcopy(net)", "net.__class__ = type('Other', (Net,), {})", "net.register_forward_pre_hook(lambda m, a, k: (a, k), with_kwargs=True)",
            "x = x.as_subclass(Tagged)", "x = torch.ones(3, 4).clone(memory_format=torch.contiguous_format)", "x = torch.ones(6, 4)[::2]", "x = torch.ones(12)[:].as_strided((3, 4), (4, 1))", "x = torch.ones(2, 3, 4)", "x = torch.zeros(0, 4)", "x = torch.ones(3, 4, dtype=torch.complex64)", "x = torch.ones(3, 4, dtype=torch.bool)", "y = x.view(-1)[:4]", "x.unsqueeze_(0)", "x.t_()", "x.resize_(2, 2) if x.is_contiguous() and x.numel() > 3 else None", "x.requires_grad_(False)", "del x.some", "y.requires_grad_()", "n = torch.tensor(2)", "n = np.int64(3)", "mode = None", "mode = b'abc'", "flag = None", "flag = torch.tensor(True)",
            "box = None", "box = types.SimpleNamespace(value=1, t=x, log=[], twice=3, kind='s')", "box.log = collections.deque([1])", "box.value = 1.5", "del box.value", "Box.__len__ = lambda self: 0", "Box.__getattr__ = lambda self, name: 6", "Box.__setattr__ = lambda self, name, v: object.__setattr__(self, name, v)", "Box.value = property(lambda self: 5)", "Box.twice = 4", "del Sub.scale", "Sub.__bases__ = (Box,)", "items[0] = items[-1]", "items = [x, x]", "items = collections.deque([x, y])", "items[0] = items[0].double()", "table = collections.defaultdict(int, a=2)", "table = types.MappingProxyType({'a': 1})",
            "table['a'] = 2", "table.pop('a', None)", "table = Output(a=1)", "helper0 = lambda z, n=1: z", "main.__defaults__ = None", "np.random.seed(0)", "Point.__match_args__ = ('y', 'x')", "Point.x = 3", "Pair.left = 5", "Color.RED._value_ = 9", "Frozen.x = 2", "Slotted.a = 4", "Slotted.extra = 1", "G_ITER = iter([1, 2])", "G_ITER = iter(items)", "G_ITER = enumerate(G_L)", "G_COUNT = counter(2)", "G_COUNT.close()", "G_PIECES = both(x)", "next(G_COUNT, 0)", "G_ARR = G_ARR.T", "G_ARR = np.zeros(4)", "G_ARR[0] = 3", "G_ARR = x.detach().numpy()", "G_OPT.param_groups[0]['lr'] = 0.5", "G_OPT.state.clear()", "G_OPT.load_state_dict(copy.deepcopy(G_OPT.state_dict()))", "G_OPT.add_param_group({'params': [nn.Parameter(torch.ones(4))]})", "G_OPT = torch.optim.Adam(net.parameters(), 0.1)", "net.zero_grad()", "G_PARTS.eval()", "G_PARTS.train()", "G_PARTS = Parts()", "G_PARTS.named['c'] = nn.ReLU()", "del G_PARTS.named['a']", "G_PARTS.norm.momentum = 0.5", "G_PARTS.norm.running_mean = torch.ones(4)", "G_PARTS.norm.track_running_stats = False", "torch.nn.utils.parametrizations.weight_norm(G_PARTS.named['a'])", "G_PARTS.register_state_dict_post_hook(lambda m, d, p, l: d.clear())", "G_PARTS.chain = nn.Sequential(nn.Identity())", "G_PARTS.listed[0] = nn.Parameter(torch.zeros(4))", "G_PARTS.table.weight.requires_grad_(False)", "G_PARTS = torch.nn.Identity()", "G_PARTS = magneto.optimize('eager')(Parts())", "Ranked.__lt__ = lambda self, other: True", "Ranked.__hash__ = None", "Ranked.__index__ = lambda self: 0", "Countdown.__next__ = lambda self: next(iter([]))", "First.rank = 9", "Registered.known.clear()", "Duck.__torch_function__ = classmethod(lambda cls, f, k, a=(), w=None: Duck(a[0].t))", "outside = lambda z, n=1: z - n", "Row.scaled = lambda self: self.t", "torch.set_float32_matmul_precision('high')", "torch.set_float32_matmul_precision('highest')", "G_OPT = torch.optim.AdamW(net.parameters(), 0.1, weight_decay=0.1)", "G_OPT.param_groups[0]['momentum'] = 0.0", "x = x.clone()", "x[0, 0] = float('nan')", "x = x.int()", "x.mul_(9)",
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
    """The case of a seed: one in six runs under aot_eager, one in thirty under inductor, the others under eager."""
    choice = random.Random(seed * 7919 + 1).random()
    backend = "inductor" if choice < 0.033 else "aot_eager" if choice < 0.2 else "eager"
    return Generator(seed).case(seed, backend)
