"""The type itself: conversion in place, copies and files, modules, autograd, what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cutting import Model, cut_module, cut_tensor
from harness import run_ranks
from lamina.core.shard_spec import DirtyFlag, ShardSpec
from lamina.core.shard_tensor import Shard, convert_, register
from lamina.errors import ShardOpError, StateError

register()


def whole_spec(full: Tensor, name: str = "w", **more: Any) -> ShardSpec:
    return ShardSpec(name, full.shape, ((0, full.numel()),), 0, None, **more)


def convert(param: nn.Parameter, name: str = "w", **more: Any) -> None:
    local = torch.zeros(param.numel()) if param.is_meta else param.detach().reshape(-1).clone()
    convert_(param, local, whole_spec(param, name, **more))


# -- conversion in place, one rank


def test_conversion_keeps_the_object():
    module = nn.Linear(4, 3)
    param = module.weight
    param.no_weight_decay = True
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    values = param.detach().clone()
    held = weakref.ref(param)
    convert(param)
    assert module.weight is param is optimizer.param_groups[0]["params"][0] is held()
    assert type(param) is Shard and isinstance(param, nn.Parameter) and param.is_leaf and param.requires_grad
    assert param.no_weight_decay and param.shape == (3, 4) and param.numel() == 12 and param.name == "w"
    assert torch.equal(param.full(), values) and (param.start, param.stop) == (0, 12)


def test_conversion_of_meta_ties_frozen_and_other_dtype():
    with torch.device("meta"):
        meta = nn.Linear(4, 3)
    convert(meta.weight)
    assert meta.weight.device.type == "cpu"
    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    convert(embedding.weight)
    assert head.weight is embedding.weight
    frozen = nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)
    convert(frozen)
    assert not frozen.requires_grad and torch.equal(frozen.full(), torch.arange(6, dtype=torch.int8))
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    half.grad = torch.full((3,), 2.0, dtype=torch.bfloat16)
    flag = DirtyFlag()
    convert_(half, torch.ones(3), whole_spec(half, dirty=flag))
    assert half.dtype == torch.float32 and half.grad.dtype == torch.float32
    assert (
        type(half.grad) is Shard
        and half.grad.spec.dirty is None
        and torch.equal(half.grad.full(), torch.full((3,), 2.0))
    )


def test_conversion_after_a_forward():
    module = nn.Linear(4, 3)
    output = module(torch.randn(2, 4)).sum()
    output.backward()
    grad = module.weight.grad.clone()
    with torch.no_grad():
        convert(module.weight)  # the output still lives, its graph is spent
    assert torch.equal(module.weight.grad.full(), grad)
    module = nn.Linear(4, 3)
    output = module(torch.randn(2, 4)).sum()
    convert(module.weight)
    with pytest.raises(StateError, match="before `w` was sharded"):
        output.backward()


@pytest.mark.parametrize("weak", [False, True])
def test_conversion_refuses_while_views_live(weak):
    param = nn.Parameter(torch.randn(3, 4))
    holder = weakref.ref(param) if weak else None
    view = param.view(-1)
    with pytest.raises(StateError, match="views of `w` first"):
        convert(param)
    del view
    convert(param)
    assert type(param) is Shard and (holder is None or holder() is param)


def test_hooks_set_before_stay_on_the_object():
    param = nn.Parameter(torch.ones(2))
    param.register_hook(lambda grad: grad * 2)
    param.register_post_accumulate_grad_hook(lambda p: None)
    convert(param)
    assert len(param._backward_hooks) == 1 and len(param._post_accumulate_grad_hooks) == 1


# -- the flag that tells of writes


WRITES: dict[str, Callable[[Shard], Any]] = {
    "mul_": lambda p: p.mul_(2),
    "copy_": lambda p: p.copy_(torch.ones(p.shape)),
    "data": lambda p: setattr(p, "data", torch.ones(p.shape)),
    "data.add_": lambda p: p.data.add_(1),
    "detach().zero_": lambda p: p.detach().zero_(),
    "view": lambda p: p.view(-1).fill_(1),
    "normal_": lambda p: p.normal_(),
    "mask": lambda p: p.masked_fill_(p > 0, 0.0),
    "index": lambda p: p.__setitem__(p > 0, 0.0),
    "out": lambda p: torch.maximum(p.detach(), p.detach(), out=p.detach()),
    "foreach": lambda p: torch._foreach_mul_([p, p.detach()], 2.0),
    "foreach lists": lambda p: torch._foreach_copy_([p.detach()], [torch.ones(p.shape)]),
}
NO_WRITES: dict[str, Callable[[Shard], Any]] = {
    "result": lambda p: (p * 2).mul_(3),
    "clone": lambda p: p.detach().clone().zero_(),
    "like": lambda p: torch.zeros_like(p).add_(1),
    "foreach": lambda p: torch._foreach_mul([p], 2.0)[0].mul_(2),
    "deepcopy": lambda p: copy.deepcopy(p).data.zero_(),
    "to": lambda p: p.detach().double().zero_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_mark(write):
    flag = DirtyFlag()
    param = nn.Parameter(torch.randn(3, 4))
    convert(param, dirty=flag)
    with torch.no_grad():
        WRITES[write](param)
    assert flag.value


@pytest.mark.parametrize("other", NO_WRITES)
def test_nothing_else_marks(other):
    flag = DirtyFlag()
    param = nn.Parameter(torch.randn(3, 4))
    convert(param, dirty=flag)
    with torch.no_grad():
        NO_WRITES[other](param)
    assert not flag.value


# -- refusals: everything that would need other elements, by name and with the cure


REFUSED: dict[str, Callable[[Shard], Any]] = {
    "matmul": lambda p: torch.ones(2, 5) @ p.t(),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 5), p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "index": lambda p: p[0],
    "iterate": list,
    "sum over a dim": lambda p: p.sum(0),
    "mean over a dim": lambda p: p.mean(dim=1, keepdim=True),
    "max over a dim": lambda p: p.max(0),
    "norm over a dim": lambda p: p.norm(dim=1),
    "argmax": lambda p: p.argmax(),
    "std": lambda p: p.std(),
    "sort": lambda p: p.sort(),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "transpose": lambda p: p.transpose(0, 1),
    "bigger view": lambda p: p.expand(2, 7, 5),
    "broadcast against more": lambda p: p * torch.ones(2, 7, 5),
    "no broadcast": lambda p: p + torch.ones(3),
    "no broadcast from the left": lambda p: torch.ones(3) - p,
    "comparison": lambda p: p == torch.ones(3),
    "matmul from the left": lambda p: torch.ones(2, 7) @ p,
    "power": lambda p: p ** torch.ones(3),
    "write to plain": lambda p: torch.ones(7, 5).add_(p),
    "copy to plain": lambda p: torch.empty(7, 5).copy_(p),
    "out plain": lambda p: torch.add(p, 1, out=torch.empty(7, 5)),
    "foreach into plain": lambda p: torch._foreach_add_([torch.ones(7, 5)], [p]),
    "foreach of one": lambda p: torch._foreach_mul_([torch.ones(7, 5)], p),
    "assign an element": lambda p: p.__setitem__(0, 0.0),
    "assign one element": lambda p: p.__setitem__((0, 0), 0.0),
    "eye": lambda p: nn.init.eye_(p),
    "cumsum": lambda p: p.cumsum(0),
    "softmax": lambda p: p.softmax(0),
    "svd": lambda p: torch.linalg.svdvals(p),
    "numpy": lambda p: p.numpy(),
    "numpy forced": lambda p: p.numpy(force=True),
    "asarray": np.asarray,
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p.item(),
    "share_memory_": lambda p: p.share_memory_(),
    "dlpack": torch.from_dlpack,
    "storage": lambda p: p.storage(),
    "apply_": lambda p: p.apply_(abs),
    "as_strided": lambda p: p.as_strided((3,), (1,)),
    "resize": lambda p: p.detach().resize_(3),
    "set_": lambda p: p.set_(torch.ones(7, 5)),
    "data of another shape": lambda p: setattr(p, "data", torch.ones(1)),
    "data of another dtype": lambda p: setattr(p, "data", torch.ones(7, 5, dtype=torch.float64)),
    "to vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "rrelu": lambda p: nn.functional.rrelu(p, training=True),
    "view as a dtype of another size": lambda p: p.view(torch.uint8),
    "sample": lambda p: torch.multinomial(p.abs(), 1),
    "random of probabilities": lambda p: torch.empty_like(p).bernoulli_(torch.rand(7, 5)),
}


@pytest.mark.parametrize("use", REFUSED)
def test_refused_by_name(use):
    param = nn.Parameter(torch.rand(7, 5))
    convert(param, "layers.0.weight")
    with torch.no_grad(), pytest.raises(ShardOpError, match=r"layers\.0\.weight"):
        REFUSED[use](param)


def test_refusal_tells_the_cure():
    param = nn.Parameter(torch.rand(7, 5))
    convert(param, "layers.0.weight")
    with pytest.raises(ShardOpError, match=r"\(7, 5\).*Call the module.*lamina\.gathered.*full\(\)"):
        param.t()


def test_unlike_cuts_do_not_mix():
    one = Shard(torch.ones(5), ShardSpec("one", torch.Size((7,)), ((0, 5), (5, 7)), 0, None))
    two = Shard(torch.ones(4), ShardSpec("two", torch.Size((7,)), ((0, 4), (4, 7)), 0, None))
    assert torch.equal((2.0 - one).local, torch.ones(5)) and torch.equal((one == 1.0).local, torch.ones(5).bool())
    for use in (
        lambda: one + two,
        lambda: one == two,
        lambda: one.copy_(two),
        lambda: torch._foreach_add_([one, one], [one, two]),
    ):
        with pytest.raises(ShardOpError, match=r"one.*two"):
            use()
    with pytest.raises(StateError, match="process group"):
        one.sum()  # never the sum of a part


def test_harmless_questions_need_nobody():
    piece = Shard(torch.ones(5), ShardSpec("one", torch.Size((7,)), ((0, 5), (5, 7)), 0, None))
    assert "one" in repr(piece) and "[0, 5)" in f"{piece}" and len(piece) == 7 and piece.data_ptr() == 0
    assert piece.is_contiguous() and piece.contiguous() is piece and piece.cpu() is piece and piece.float() is piece
    assert piece.new_zeros(3).shape == (3,) and type(piece.new_zeros(7)) is Tensor
    staged = piece.new_empty(piece.size(), device="cpu")
    assert type(staged) is Shard and staged.local.shape == (5,)


# -- modules, copies and files, on several ranks


def modules_and_copies() -> None:
    plain, model = Model(torch.float64), Model(torch.float64)
    flat = cut_module(model)
    ids = [id(param) for param in model.parameters()]
    other = Model(torch.float64)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(1)
    model.load_state_dict(other.state_dict())  # full, in place
    assert all(torch.equal(p.full(), q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    shards = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(plain.state_dict())
    model.load_state_dict(shards)
    assert all(torch.equal(p.full(), q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert ids == [id(param) for param in model.parameters()]
    begin, end = flat.data_ptr(), flat.data_ptr() + 8 * flat.numel()
    assert all(begin <= param.local.data_ptr() < end for param in model.parameters() if param.local.numel())
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**other.state_dict(), "scale": torch.ones(3)})
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.first.weight.zero_()
    assert torch.equal(model.first.weight.full(), other.first.weight) and isinstance(twin.scale, nn.Parameter)
    assert twin.first.weight.spec.group is model.first.weight.spec.group
    with torch.inference_mode():
        assert type(model.state_dict()["first.weight"]) is Shard and model.first.weight.sum().ndim == 0
    plain_again = Model(torch.float64)
    with pytest.raises((ShardOpError, RuntimeError), match=r"first\.weight"):
        plain_again.load_state_dict(model.state_dict())
    assert torch.equal(model.scale.full(), torch.tensor(2.5, dtype=torch.float64)) and float(model.scale) == 2.5


def files() -> None:
    model = Model()
    cut_module(model)
    model.first.weight.color = "red"
    values = [param.full() for param in model.parameters()]
    for weights_only in (True, False):
        file = io.BytesIO()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.save(model.state_dict(), file)
        is_warned = dist.get_rank() == 0 and dist.get_world_size() > 1
        assert [str(one.message)[:20] for one in said][:1] == ["rank 0's parts of sh"] * is_warned
        file.seek(0)
        loaded = torch.load(file, weights_only=weights_only)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(loaded)
        assert all(torch.equal(p.full(), q) for p, q in zip(model.parameters(), values, strict=True))
    param = pickle.loads(pickle.dumps(model.first.weight))
    assert isinstance(param, nn.Parameter) and param.requires_grad and param.color == "red"
    assert param.spec.detached == (dist.get_world_size() > 1)
    huge = cut_tensor(torch.zeros(1000))
    big = Shard(torch.zeros(100_000)[: huge.local.numel()], huge.spec)
    assert len(pickle.dumps(big)) < 10_000  # the range, not the buffer it is a view of


def autograd(expect_equal: Callable[[Tensor, Tensor], bool] = torch.allclose) -> None:
    plain, model = Model(torch.float64), Model(torch.float64)
    cut_module(model)
    w, full = model.first.weight, plain.first.weight
    (grad,) = torch.autograd.grad(w.pow(3).sum(), [w])
    (expected,) = torch.autograd.grad(full.pow(3).sum(), [full])
    assert type(grad) is Shard and expect_equal(grad.full(), expected)
    (second,) = torch.autograd.grad(torch.autograd.grad(w.pow(3).sum(), w, create_graph=True)[0].sum(), [w])
    assert expect_equal(second.full() if type(second) is Shard else second, 6 * full)
    loss = nn.functional.linear(torch.ones(2, 5, dtype=torch.float64), full).sum()  # a forward on another tensor
    for inputs in (w, [w], [full, w], {"w": w}):
        for more in ({}, {"allow_unused": True}, {"materialize_grads": True}):
            with pytest.raises(ShardOpError, match=r"first\.weight.*loss\.backward\(\)"):
                torch.autograd.grad(loss, inputs, retain_graph=True, **more)
    with pytest.raises(ShardOpError, match=r"first\.weight"):
        loss.backward(inputs=[w], retain_graph=True)
    loss.backward(inputs=[full])
    assert w.grad is None and full.grad is not None
    w.pow(2).sum().backward(inputs=[w])
    assert expect_equal(w.grad.full(), 2 * full)
    seen: list[Any] = []
    handle = w.register_hook(lambda g: seen.append(type(g)))
    w.grad = None
    w.pow(2).sum().backward()
    handle.remove()
    assert seen == [Shard]


@pytest.mark.parametrize("work", [modules_and_copies, files, autograd])
@pytest.mark.parametrize("world", [1, 3])
def test_on_ranks(world, work):
    run_ranks(world, work)


# -- distributed checkpoints
