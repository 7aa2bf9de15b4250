"""Shards and `torch.distributed.checkpoint`: written by some ranks, read by others, plain or cut."""

from __future__ import annotations

from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from cutting import Model, cut_module, part_of
from harness import run_ranks
from lamina.core.shard_spec import GlobalSpec, ShardSpec
from lamina.core.shard_tensor import Shard, register

register()


def _dcp() -> ModuleType:
    """Imported where it is called: it takes a second, which most processes that collect tests need not pay."""
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def save_checkpoint(path: str) -> None:
    model = Model(torch.float64)
    cut_module(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = part_of(torch.ones(param.shape, dtype=torch.float64), param)
    optimizer.step()
    _dcp().save(
        {"model": model.state_dict(), "exp_avg": optimizer.state[model.first.weight]["exp_avg"]}, checkpoint_id=path
    )


def load_checkpoint(path: str, into: str) -> list[Tensor]:
    model = Model(torch.float64)
    if into == "shards":
        cut_module(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    state = {"model": model.state_dict(), "exp_avg": torch.zeros_like(model.first.weight)}
    _dcp().load(state, checkpoint_id=path)
    values = [*model.parameters(), state["exp_avg"]]
    return [value.full() if type(value) is Shard else value.detach() for value in values]


def save_plain(path: str) -> list[Tensor]:
    model = Model(torch.float64)
    _dcp().save(
        {"model": model.state_dict(), "exp_avg": torch.full((7, 5), 0.1, dtype=torch.float64)}, checkpoint_id=path
    )
    return [*(param.detach() for param in model.parameters()), torch.full((7, 5), 0.1, dtype=torch.float64)]


def test_distributed_checkpoint_to_any_world(tmp_path):
    run_ranks(3, save_checkpoint, str(tmp_path / "a"))
    expected = run_ranks(1, load_checkpoint, str(tmp_path / "a"), "plain")[0]
    assert all(value.abs().sum() > 0 for value in expected[:2]) and torch.allclose(
        expected[-1], torch.tensor(0.1).double()
    )
    for world in (1, 2, 3, 4):
        for values in run_ranks(world, load_checkpoint, str(tmp_path / "a"), "shards"):
            assert all(torch.equal(got, want) for got, want in zip(values, expected, strict=True))


def test_distributed_checkpoint_of_plain_tensors(tmp_path):
    expected = run_ranks(1, save_plain, str(tmp_path / "b"))[0]
    for values in run_ranks(2, load_checkpoint, str(tmp_path / "b"), "shards"):
        assert all(torch.equal(got, want) for got, want in zip(values, expected, strict=True))


def save_async(path: str) -> None:
    model = Model(torch.float64)
    cut_module(model)
    future = _dcp().async_save(
        {"model": model.state_dict(), "exp_avg": torch.ones_like(model.first.weight)}, checkpoint_id=path
    )
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)
    future.result()


def test_asynchronous_checkpoint(tmp_path):
    run_ranks(3, save_async, str(tmp_path / "c"))
    values = run_ranks(2, load_checkpoint, str(tmp_path / "c"), "shards")[0]
    assert all(torch.equal(a, b.detach()) for a, b in zip(values, Model(torch.float64).parameters(), strict=False))


def save_columns(path: str) -> None:
    """A parameter that is one rank's columns of a larger one, cut no further."""
    rank, world = dist.get_rank(), dist.get_world_size()
    larger = torch.arange(24.0).view(4, 6)
    columns = 6 // world
    mine = larger[:, rank * columns : (rank + 1) * columns].contiguous()
    of_larger = GlobalSpec(larger.shape, 1, rank * columns)
    whole = ((0, mine.numel()),)
    spec = ShardSpec("w", mine.shape, whole, 0, None, outer=(dist.group.WORLD,), global_spec=of_larger)
    shard = Shard(mine.reshape(-1), spec)
    assert shard.sum().item() == larger.sum().item() and torch.allclose(shard.norm(), larger.norm())
    assert shard.mean().item() == larger.mean().item() and shard.max().item() == 23
    torch.manual_seed(3)
    expected = torch.empty(4, 6).normal_()
    torch.manual_seed(3)
    drawn = torch.zeros_like(shard).normal_()
    assert torch.equal(drawn.full(), expected[:, rank * columns : (rank + 1) * columns])
    _dcp().save({"x": shard}, checkpoint_id=path)


def load_columns(path: str) -> Tensor:
    state = {"x": torch.zeros(4, 6)}
    _dcp().load(state, checkpoint_id=path)
    return state["x"]


def test_a_part_of_a_larger_tensor_counts_once(tmp_path):
    run_ranks(2, save_columns, str(tmp_path / "d"))
    assert torch.equal(run_ranks(1, load_columns, str(tmp_path / "d"))[0], torch.arange(24.0).view(4, 6))
