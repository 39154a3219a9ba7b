"""Tensors as Python values: attributes, methods, operators, indexing, in-place changes, factories, parameters and modules."""

# ruff: noqa

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import magneto
from tests.compare import assert_equal
from tests.python.programs import Program, Programs, X, Y, check

programs = Programs()


@programs.add()
def attributes(x):
    return (
        *(x.shape, x.ndim, x.dtype, x.device, x.requires_grad, x.is_cuda, x.is_leaf, x.layout, x.itemsize, x.nbytes, x.grad, x.is_sparse),
        *(
            x.size(),
            x.size(0),
            x.size(-1),
            x.dim(),
            x.numel(),
            x.stride(),
            x.stride(1),
            x.is_contiguous(),
            x.t().is_contiguous(),
            x.element_size(),
        ),
        *(
            x.is_floating_point(),
            x.is_complex(),
            torch.zeros(3)[1:].storage_offset(),
            x.get_device(),
            x.type(),
            len(x),
            x.T,
            x.mT,
            x.data,
            x.real,
        ),
    )


@programs.add(X, Y)
def operators(x, y):
    return (
        x + y,
        x - 1,
        2 * x,
        x / 2,
        1 / (x + 2),
        x // 0.3,
        x % 2,
        x**2,
        2**x,
        -x,
        abs(x),
        x @ x.T,
        x < y,
        x >= 0,
        x == y,
        x != 0,
        (x > 0) & (y > 0),
        ~(x > 0),
        (x > 0) | (y > 0),
        (x > 0) ^ (y > 0),
        +x,
        divmod(5, 3),
    )


@programs.add(X, torch.tensor([2, 0]))
def indexing(x, i):
    return (
        x[0],
        x[-1],
        x[:, 1],
        x[..., 0],
        x[None],
        x[0:2, ::2],
        x[i],
        x[i, 0],
        x[(0, 1)],
        x[:, None, 1:],
        x[[0, 2]],
        x[0][1],
        x[slice(1, 3)],
    )


@programs.add()
def methods_chain(x):
    return (
        x.view(2, 6).transpose(0, 1).contiguous().reshape(-1).unsqueeze(0).squeeze().sum(),
        x.mean(dim=1, keepdim=True),
        x.softmax(-1),
        x.permute(1, 0).flatten(),
        x.expand(2, 3, 4),
        x.chunk(2, dim=1),
        x.split([1, 3], dim=1),
        x.max(dim=1),
        x.max(),
        x.topk(2),
        x.sort(descending=True)[0],
        x.clamp(min=0),
        x.float(),
        x.double(),
        x.to(torch.float16),
        x.type(torch.int64),
    )


@programs.add(X, Y)
def torch_functions(x, y):
    return (
        torch.cat([x, x]),
        torch.stack((y, y)),
        torch.where(x > 0, x, torch.zeros_like(x)),
        torch.einsum("ij,j->i", x, y),
        torch.split(x, 2, dim=1),
        torch.tensor([1.0, 2.0]),
        torch.arange(3),
        torch.ones(2, 3, dtype=torch.int32),
        torch.full((2,), 7.0),
        torch.eye(2),
        torch.linspace(0, 1, 3),
        torch.meshgrid(y, y, indexing="ij"),
        torch.broadcast_tensors(x, y),
        torch.is_tensor(x),
        torch.numel(x),
        torch.is_floating_point(x),
    )


@programs.add()
def functional(x):
    return (
        F.relu(x),
        F.gelu(x),
        F.softmax(x, dim=-1),
        F.layer_norm(x, (4,)),
        F.linear(x, torch.ones(2, 4)),
        F.pad(x, (1, 1)),
        F.dropout(x, 0.5, training=False),
        F.one_hot(torch.tensor([0, 1]), num_classes=3),
        F.normalize(x, dim=-1),
        F.cross_entropy(x, torch.tensor([0, 1, 2])),
    )


@programs.add(X, Y)
def in_place(x, y):
    x += 1
    x.mul_(2)
    x[0] = y
    x[:, 1] *= 3
    z = y.clone()
    z.add_(1).relu_()
    F.relu(z, inplace=True)
    z -= y
    return x.sum(), z


@programs.add(X, X.clone())
def views_share_memory(x, z):
    row = z[0]
    row.zero_()
    x.t()[1].fill_(5)
    return z + 1, row


@programs.add()
def shape_arithmetic(x):
    b, n = x.shape
    h = n // 2
    return x.reshape(b, h, -1), x.new_zeros(b, *x.shape[1:]), torch.Size([b, n]) == x.shape, x.shape[:-1] + (1,), x.view(*x.shape, 1).shape


@programs.add(nn.Parameter(torch.ones(3)), X)
def parameters(p, x):
    return (
        p.requires_grad,
        isinstance(p, nn.Parameter),
        isinstance(p, torch.Tensor),
        (p * 2).requires_grad,
        p.detach() * 2,
        p.grad,
        type(p).__name__,
    )


@programs.add(X, torch.tensor([1, 2]), torch.tensor([True, False]))
def dtypes(x, i, b):
    return (
        x + i[0],
        i + b[0],
        i / 2,
        i.float(),
        (i + 1.5).dtype,
        torch.promote_types(torch.int32, torch.float16),
        torch.result_type(x, i),
        torch.finfo(x.dtype).min,
        torch.iinfo(torch.int8).max,
        torch.get_default_dtype(),
    )


@programs.add()
def tuples_of_tensors(x):
    values, indices = x.max(dim=1)
    result = torch.max(x, 1)
    return values, indices, result.values, result[1], len(result)


class Block(nn.Module):
    def __init__(self, n, flag=True):
        super().__init__()
        self.first = nn.Linear(n, n)
        self.norm = nn.LayerNorm(n)
        self.register_buffer("scale", torch.tensor(2.0))
        self.flag = flag
        self.calls = 0

    def forward(self, x, *, residual=True):
        y = self.norm(F.gelu(self.first(x))) * self.scale
        return x + y if residual and self.flag else y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(4) for _ in range(3)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Sequential(nn.ReLU(), nn.Dropout(0.1), nn.Linear(4, 3))})
        self.weights = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.bn = nn.BatchNorm1d(4)
        self.act = F.relu

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x, residual=i > 0)
        x = self.act(self.bn(x))
        for w in self.weights:
            x = x * w
        n = sum(p.numel() for p in self.parameters())
        return {name: head(x) for name, head in self.heads.items()}, n, len(self.blocks), self.training, self.blocks[-1].flag


@programs.add(Net().eval(), X)
def modules(net, x):
    return net(x)


@programs.add(Net().train(), X)
def modules_in_training(net, x):
    torch.manual_seed  # noqa: B018
    return net.blocks(x) if False else net.bn(net.blocks[0](x))


@programs.add(Block(4), X)
def module_attributes_change(block, x):
    block.calls += 1
    block.last = x * 2
    block.scale = block.scale * 2
    return block(x) * block.calls


@programs.add(Net().eval(), X)
def walking_modules(net, x):
    names = [name for name, _ in net.named_parameters()]
    kinds = [type(child).__name__ for child in net.children()]
    return (
        x,
        names,
        kinds,
        len(list(net.modules())),
        isinstance(net.bn, nn.BatchNorm1d),
        "a" in net.heads,
        [type(m).__name__ for m in net.heads["b"]],
    )


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.register_forward_hook(lambda module, args, out: out * 2)
        self.inner.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x):
        return self.inner(x)


@programs.add(Hooked(), X)
def hooks(net, x):
    return net(x)


@programs.add(X)
def autograd_flags(x):
    y = x.clone()
    return y.requires_grad, y.detach().requires_grad, torch.is_grad_enabled(), y.is_leaf


@pytest.mark.parametrize("program", programs, ids=programs.ids())
def test_program(program: Program) -> None:
    check(program)


def test_random_numbers_are_eagers() -> None:
    def program(x):
        return F.dropout(x, 0.5) + torch.rand_like(x), torch.rand(3) + torch.randn(3), torch.randint(0, 9, (4,)), torch.randperm(5)

    torch.manual_seed(3)
    plain = program(X)
    torch.manual_seed(3)
    assert_equal(magneto.optimize("eager", nopython=True)(program)(X), plain)
