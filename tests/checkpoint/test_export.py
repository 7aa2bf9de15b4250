"""Hugging Face folders: written by all ranks in place, read by transformers and safetensors, read back into shards."""

from __future__ import annotations

import json
import unittest.mock
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import lamina
from checkpoint.training import UNITS, build, full_values
from harness import expect_error, run_ranks
from lamina.checkpoint import exporting


def export_everything(folder: str, strategy: Any) -> dict[str, Tensor]:
    model = lamina.shard(build(), strategy, units=UNITS)
    lamina.export(f"{folder}/whole", model)
    lamina.export(f"{folder}/split", model, dtype="bf16", file_bytes=600)
    return full_values(model)


def read_everything(folder: str, strategy: Any) -> list[bool]:
    wanted = build().state_dict()
    right = []
    for name in ("whole", "split"):
        model = lamina.shard(build(seed=3), strategy, units=UNITS)
        assert lamina.load(f"{folder}/{name}", model) is None
        for key, value in full_values(model).items():
            if key != "not_kept":
                right.append(
                    torch.equal(value, wanted[key].bfloat16().to(value.dtype) if name == "split" else wanted[key])
                )
    return right


def test_folders_are_split_cast_and_read_back_into_any_layout(tmp_path: Path) -> None:
    for world, strategy in ((2, "zero3"), (4, lamina.Strategy(2, 2, 2))):
        folder = tmp_path / str(world)
        values = run_ranks(world, export_everything, str(folder), strategy)[0]
        names = values.keys() - {"not_kept"}
        assert [path.name for path in (folder / "whole").iterdir()] == ["model.safetensors"]
        whole = load_file(folder / "whole" / "model.safetensors")
        assert whole.keys() == names and all(torch.equal(whole[name], values[name]) for name in names)
        assert all(whole[name].dtype is values[name].dtype for name in names)
        index = json.loads((folder / "split" / "model.safetensors.index.json").read_text())
        files = {path.name: load_file(path) for path in (folder / "split").glob("*.safetensors")}
        assert len(files) > 3 and index["weight_map"] == {k: file for file, held in files.items() for k in held}
        total = 0
        for file, held in files.items():
            size = sum(t.numel() * t.element_size() for t in held.values())
            assert size <= 600 or len(held) == 1, file
            total += size
            for key, value in held.items():
                wanted = values[key].bfloat16() if values[key].is_floating_point() else values[key]
                assert value.dtype is wanted.dtype and torch.equal(value, wanted)
        assert total == index["metadata"]["total_size"]
    for world, strategy in ((1, "ddp"), (2, "zero1")):
        assert all(map(all, run_ranks(world, read_everything, str(tmp_path / "2"), strategy)))


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(9, 9).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(9, 2, bias=False), nn.Linear(2, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def export_adapters(path: str) -> None:
    model = lamina.shard(Adapted())
    lamina.export(path, model, parameters=["*lora*"])


def test_adapters_only(tmp_path: Path) -> None:
    run_ranks(4, export_adapters, str(tmp_path / "a"))
    held = load_file(tmp_path / "a" / "model.safetensors")
    assert held.keys() == {"lora_a.weight", "lora_b.weight"}
    assert {name: tuple(value.shape) for name, value in held.items()} == {
        "lora_a.weight": (2, 9),
        "lora_b.weight": (9, 2),
    }


def export_wide_adapters(path: str) -> None:
    torch.manual_seed(0)
    model = lamina.shard(nn.Sequential(nn.Linear(40, 40, bias=False)))
    model[0].weight.local.fill_(dist.get_rank())
    lamina.export(path, model, parameters="0.*")


def test_each_of_four_ranks_writes_its_range(tmp_path: Path) -> None:
    run_ranks(4, export_wide_adapters, str(tmp_path / "a"))
    weight = load_file(tmp_path / "a" / "model.safetensors")["0.weight"].flatten()
    assert weight.unique_consecutive().tolist() == [0, 1, 2, 3] and weight.shape == (1600,)


def refused(path: str, **options: Any) -> None:
    lamina.export(path, lamina.shard(build(), units=UNITS), **options)


def damaged_on_the_way(path: str) -> None:
    """A disk that loses a byte of what rank 1 writes."""
    model = lamina.shard(build(), units=UNITS)
    write = exporting.write_at

    def lose(descriptor: int, data: memoryview, at: int) -> None:
        write(descriptor, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])), at)

    with unittest.mock.patch.object(exporting, "write_at", lose if dist.get_rank() == 1 else write):
        lamina.export(path, model)


def test_what_export_refuses(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    expect_error(2, refused, path, error="UsageError", contains=["'*lore*'"], parameters=["*lore*"])
    expect_error(2, refused, path, error="UsageError", contains=["'int8'"], dtype="int8")
    expect_error(2, refused, str(tmp_path.parent), error="UsageError", contains=["exists"])
    expect_error(2, damaged_on_the_way, path, error="CheckpointError", contains=["reads back", "on rank 1 of 2"])
    assert list(tmp_path.iterdir()) == []


def transformers_there_and_back(folder: str) -> list[bool]:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config)
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    model = lamina.shard(plain)
    lamina.export(f"{folder}/ours", model)
    loaded, told = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/ours", output_loading_info=True)
    right = [
        not told["missing_keys"],
        not told["unexpected_keys"],
        loaded.lm_head.weight is loaded.model.embed_tokens.weight,
    ]
    right += [torch.equal(value, wanted[name]) for name, value in loaded.state_dict().items()]
    right.append(json.loads(Path(folder, "ours", "config.json").read_text())["architectures"] == ["LlamaForCausalLM"])
    if dist.get_rank() == 0:
        loaded.save_pretrained(f"{folder}/theirs")
    dist.barrier()
    torch.manual_seed(1)
    other = lamina.shard(transformers.LlamaForCausalLM(config))
    lamina.load(f"{folder}/theirs", other)
    with lamina.gathered(list(other.parameters())) as values:
        names = [name for name, _ in other.named_parameters()]
        right += [torch.equal(value, wanted[name]) for name, value in zip(names, values, strict=True)]
    return right


def test_transformers_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    assert all(map(all, run_ranks(2, transformers_there_and_back, str(tmp_path), timeout=120)))
