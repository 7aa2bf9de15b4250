"""Files of one process, torch.distributed.checkpoint of FSDP2 jobs, and back; the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lamina
from checkpoint.training import UNITS, build, full_values, largest_difference, make_optimizer, own_values, train
from harness import expect_error, run_ranks
from lamina.checkpoint.commands import main

STEPS = range(2, 5)
TOLERANCE = 1e-10


def one_process(path: str | None) -> dict[str, torch.Tensor]:
    """Plain torch, two steps, a file, three steps."""
    model = build()
    optimizer = make_optimizer("torch", model)
    train(model, optimizer, range(2))
    if path is not None:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": {"step": 2}}
        torch.save(saved, path)
        names = {id(p): name for name, p in model.named_parameters()}
        for group, kept in zip(optimizer.param_groups, saved["optimizer"]["param_groups"], strict=True):
            kept["param_names"] = [
                names[id(p)] for p in group["params"]
            ]  # as an optimizer of named parameters has them
        torch.save(saved, f"{path}-named")
    train(model, optimizer, STEPS)
    return own_values(model)


def go_on(path: str, strategy: Any, kind: str) -> tuple[Any, Any]:
    """Loaded into another model, and three steps on."""
    model = lamina.shard(build(seed=5), strategy, units=UNITS)
    optimizer = make_optimizer(kind, model)
    extra = lamina.load(path, model, optimizer)
    train(model, optimizer, STEPS)
    return full_values(model), extra


def save_there(path: str, strategy: Any) -> dict[str, torch.Tensor]:
    model = lamina.shard(build(), strategy, units=UNITS)
    optimizer = make_optimizer("lamina", model)
    train(model, optimizer, range(2))
    lamina.save(path, model, optimizer, extra={"step": 2})
    train(model, optimizer, STEPS)
    return full_values(model)


def in_torch(path: str) -> dict[str, torch.Tensor]:
    """A file goes on in one process of plain torch."""
    model = build(seed=6)
    optimizer = make_optimizer("torch", model)
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert saved["extra"] == {"step": 2}
    train(model, optimizer, STEPS)
    return own_values(model)


def test_files_of_one_process_both_ways(tmp_path: Path) -> None:
    wanted = run_ranks(1, one_process, str(tmp_path / "file.pt"))[0]
    for world, strategy, kind in ((2, "zero3", "lamina"), (2, lamina.Strategy(1, 1, 2), "torch")):
        for values, extra in run_ranks(world, go_on, str(tmp_path / "file.pt"), strategy, kind):
            assert largest_difference(values, wanted) < TOLERANCE and extra == {"step": 2}
    run_ranks(2, save_there, str(tmp_path / "ours"), "zero2")
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back.pt"), "--to", "torch"]) == 0
    assert largest_difference(run_ranks(1, in_torch, str(tmp_path / "back.pt"))[0], wanted) < TOLERANCE
    assert main(["convert", str(tmp_path / "file.pt-named"), str(tmp_path / "again")]) == 0
    values, extra = run_ranks(2, go_on, str(tmp_path / "again"), "zero1", "torch")[0]
    assert largest_difference(values, wanted) < TOLERANCE and extra == {"step": 2}


# -- torch.distributed.checkpoint


class Plain(nn.Module):
    """What FSDP2 can shard: no empty parameter, one dtype."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp2(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Plain(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def full_of(model: nn.Module) -> dict[str, torch.Tensor]:
    values = {}
    for name, p in model.named_parameters():
        is_shard = isinstance(p, lamina.Shard)
        values[name] = p.full() if is_shard else p.full_tensor() if hasattr(p, "full_tensor") else p.detach()
    return {name: value.detach().clone() for name, value in values.items()}


def save_fsdp2(path: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = fsdp2(0)
    steps(model, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=path)
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # numbers its parameters
    dcp.save(plain, checkpoint_id=f"{path} numbered")
    steps(model, optimizer, STEPS)
    return full_of(model)


def go_on_from_fsdp2(path: str) -> dict[str, torch.Tensor]:
    model = lamina.shard(Plain(1), "zero3", units=["up"])
    optimizer = lamina.optim.AdamW(model.parameters(), lr=5.0)
    lamina.load(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    steps(model, optimizer, STEPS)
    return full_of(model)


def save_for_fsdp2(path: str) -> None:
    model = lamina.shard(Plain(0), "zero3")
    optimizer = lamina.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    steps(model, optimizer, range(2))
    lamina.save(path, model, optimizer)


def go_on_in_fsdp2(path: str) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, optimizer = fsdp2(1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    steps(model, optimizer, STEPS)
    return full_of(model)


def test_fsdp2_jobs_go_on_here_and_ours_there(tmp_path: Path) -> None:
    wanted = run_ranks(2, save_fsdp2, str(tmp_path / "theirs"))[0]
    for world, name in ((1, "theirs"), (2, "theirs"), (2, "theirs numbered")):
        for values in run_ranks(world, go_on_from_fsdp2, str(tmp_path / name)):
            assert largest_difference(values, wanted) < TOLERANCE
    run_ranks(2, save_for_fsdp2, str(tmp_path / "ours"))
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    for values in run_ranks(2, go_on_in_fsdp2, str(tmp_path / "dcp")):
        assert largest_difference(values, wanted) < TOLERANCE
    file = next((tmp_path / "theirs").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1000])
    words = [file.name, "cut off"]
    expect_error(2, go_on_from_fsdp2, str(tmp_path / "theirs"), error="CheckpointError", contains=words)


# -- commands


def save_small(path: str) -> None:
    model = lamina.shard(build(), "zero3", units=UNITS)
    optimizer = make_optimizer("lamina", model)
    train(model, optimizer, range(1))
    lamina.save(path, model, optimizer, extra={"step": 1})


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        run_ranks(2, save_small, str(tmp_path / "runs" / name))
    runs, one = str(tmp_path / "runs"), str(tmp_path / "runs" / "a")
    assert main(["inspect", one, "--parameters"]) == 0
    text = capsys.readouterr().out
    for word in (
        "from zero3 over 2 ranks",
        "AdamW: 2 groups",
        "exp_avg_sq",
        "blocks.0.up.weight",
        "(23, 10)",
        "= embedding",
    ):
        assert word in text, text
    assert main(["inspect", runs]) == 0
    assert capsys.readouterr().out.count("complete") == 2
    assert main(["verify", runs]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    assert main(["export", one, str(tmp_path / "hf"), "--dtype", "bf16", "--file-bytes", "700"]) == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert "embedding.weight" in index["weight_map"] and len(set(index["weight_map"].values())) > 2
    file = tmp_path / "runs" / "a" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["verify", runs]) == 1
    assert "rank-00001.safetensors is damaged" in capsys.readouterr().out
    assert main(["export", one, str(tmp_path / "hf2")]) == 1
    assert main(["convert", runs, str(tmp_path / "x")]) == 1
    assert "holds checkpoints" in capsys.readouterr().err
    assert main(["convert", one]) == 2
    assert main(["verify"]) == 1 and "give the path" in capsys.readouterr().err
    assert main(["--help"]) == 0
