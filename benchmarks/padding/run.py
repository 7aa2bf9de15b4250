"""How many elements of padding a layout costs, for models people train, beside dim-0 sharding of each tensor.

Only shapes are needed: no weights, no ranks, a second on a laptop. `python benchmarks/padding/run.py` prints the
tables of results.md; `--write` replaces that file.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lamina.core.layout import ParamSpec, Segment, lay_out, padding_bound_numel

WORLDS = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512)
LARGE_UNIT_NUMEL = 64 * 2**20  # from here on padding is at most LARGE_UNIT_SHARE, up to LARGE_UNIT_WORLD ranks
LARGE_UNIT_SHARE = 0.001
LARGE_UNIT_WORLD = 256
BOUND_NUMEL_PER_RANK = 256

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """A model as its kinds of units: how often each occurs, and the shapes of its parameters."""

    name: str
    units: dict[str, tuple[int, Shapes]]

    def segments(self, world: int) -> Iterator[tuple[str, int, Segment]]:
        """Kind of unit, how often it occurs, and its only segment."""
        for kind, (count, shapes) in self.units.items():
            specs = [ParamSpec(n, s, torch.bfloat16, torch.float32, True) for n, s in shapes.items()]
            (segment,) = lay_out(kind, specs, world).segments
            yield kind, count, segment


@dataclass(frozen=True)
class Row:
    """Padding of one kind of unit (or of a whole model) at one world size."""

    model: str
    kind: str
    world: int
    numel: int
    segments: int
    padding_numel: int
    dim0_padding_numel: int

    @property
    def share(self) -> float:
        return self.padding_numel / self.numel

    @property
    def dim0_share(self) -> float:
        return self.dim0_padding_numel / self.numel


def dim0_padding_numel(shape: tuple[int, ...], world: int) -> int:
    """Padding where dim 0 of a tensor is cut into `world` equal parts."""
    rest = 1
    for size in shape[1:]:
        rest *= size
    return (-shape[0] % world) * rest


def rows(model: Model, world: int) -> list[Row]:
    """One row a kind of unit, and the whole model last."""
    result = []
    for kind, count, segment in model.segments(world):
        dim0 = sum(dim0_padding_numel(spec.shape, world) for spec in segment.params)
        numel = segment.numel - segment.padding_numel
        result.append(Row(model.name, kind, world, count * numel, count, count * segment.padding_numel, count * dim0))
    whole = Row(
        model.name,
        "all",
        world,
        sum(row.numel for row in result),
        sum(row.segments for row in result),
        sum(row.padding_numel for row in result),
        sum(row.dim0_padding_numel for row in result),
    )
    return [*result, whole]


def check(model: Model, world: int) -> None:
    """The promise: at most 256 elements a rank and segment; 0.1 % for large units; AssertionError names the row."""
    for kind, _, segment in model.segments(world):
        where = f"{model.name}, {kind}, {world} ranks: {segment.padding_numel} elements of padding"
        assert segment.padding_numel <= world * BOUND_NUMEL_PER_RANK <= padding_bound_numel(segment), where
        numel = segment.numel - segment.padding_numel
        if numel >= LARGE_UNIT_NUMEL and world <= LARGE_UNIT_WORLD:
            assert segment.padding_numel <= LARGE_UNIT_SHARE * numel, where


def linear(name: str, rows_in: int, columns: int, bias: bool = False) -> Shapes:
    return {f"{name}.weight": (rows_in, columns)} | ({f"{name}.bias": (rows_in,)} if bias else {})


def gpt2_xl() -> Model:
    """GPT-2 XL: 1600 wide, 48 layers; its Conv1D weights are (in, out); the head is the embedding."""
    d = 1600
    block: Shapes = {"ln_1.weight": (d,), "ln_1.bias": (d,), "ln_2.weight": (d,), "ln_2.bias": (d,)}
    for name, rows_in, columns in (("qkv", d, 3 * d), ("proj", d, d), ("fc", d, 4 * d), ("fc_proj", 4 * d, d)):
        block |= {f"{name}.weight": (rows_in, columns), f"{name}.bias": (columns,)}
    root: Shapes = {"wte.weight": (50257, d), "wpe.weight": (1024, d), "ln_f.weight": (d,), "ln_f.bias": (d,)}
    return Model("GPT-2 XL", {"block": (48, block), "root": (1, root)})


def _dense(name: str, d: int, ffn: int, kv: int, layers: int, vocabulary: int, qkv_bias: bool) -> Model:
    block = linear("q", d, d, qkv_bias) | linear("k", kv, d, qkv_bias) | linear("v", kv, d, qkv_bias)
    block |= linear("o", d, d) | linear("gate", ffn, d) | linear("up", ffn, d) | linear("down", d, ffn)
    block |= {"norm_1.weight": (d,), "norm_2.weight": (d,)}
    table: Shapes = {"weight": (vocabulary, d)}
    units = {"block": (layers, block), "embedding": (1, table), "head": (1, table | {"norm.weight": (d,)})}
    return Model(name, units)


def llama_3_8b() -> Model:
    return _dense("Llama-3-8B", 4096, 14336, 1024, 32, 128256, qkv_bias=False)


def qwen_2_5_7b() -> Model:
    return _dense("Qwen2.5-7B", 3584, 18944, 512, 28, 152064, qkv_bias=True)


def gpt_oss_like() -> Model:
    """The shapes of GPT-OSS 120B: 2880 wide, 128 experts in stacked tensors, biases and attention sinks."""
    d, experts, q, kv = 2880, 128, 64 * 64, 8 * 64
    block = linear("q", q, d, True) | linear("k", kv, d, True) | linear("v", kv, d, True) | linear("o", d, q, True)
    block |= {"sinks": (64,), "norm_1.weight": (d,), "norm_2.weight": (d,)} | linear("router", experts, d, True)
    block |= {"experts.gate_up": (experts, d, 2 * d), "experts.gate_up_bias": (experts, 2 * d)}
    block |= {"experts.down": (experts, d, d), "experts.down_bias": (experts, d)}
    table: Shapes = {"weight": (201088, d)}
    return Model(
        "GPT-OSS-like", {"block": (36, block), "embedding": (1, table), "head": (1, table | {"norm.weight": (d,)})}
    )


def deepseek_v3_like(stacked: bool) -> Model:
    """The shapes of DeepSeek-V3: latent attention (MLA), 3 dense and 58 expert layers of 256 experts and one shared."""
    d, ffn, expert_ffn, experts, heads, q_rank, kv_rank = 7168, 18432, 2048, 256, 128, 1536, 512
    attention = linear("q_a", q_rank, d) | linear("q_b", heads * (128 + 64), q_rank)
    attention |= linear("kv_a", kv_rank + 64, d) | linear("kv_b", heads * (128 + 128), kv_rank)
    attention |= linear("o", d, heads * 128) | {"q_norm.weight": (q_rank,), "kv_norm.weight": (kv_rank,)}
    attention |= {"norm_1.weight": (d,), "norm_2.weight": (d,)}
    dense = attention | _gated("mlp", d, ffn)
    sparse = attention | linear("router", experts, d) | _gated("shared", d, expert_ffn)
    if stacked:
        sparse |= {"experts.gate_up": (experts, 2 * expert_ffn, d), "experts.down": (experts, d, expert_ffn)}
    else:
        for i in range(experts):
            sparse |= _gated(f"experts.{i}", d, expert_ffn)
    table: Shapes = {"weight": (129280, d)}
    units = {"dense block": (3, dense), "expert block": (58, sparse), "embedding": (1, table)}
    units["head"] = (1, table | {"norm.weight": (d,)})
    return Model(f"DeepSeek-V3-like, {'stacked' if stacked else 'separate'} experts", units)


def _gated(name: str, d: int, ffn: int) -> Shapes:
    return linear(f"{name}.gate", ffn, d) | linear(f"{name}.up", ffn, d) | linear(f"{name}.down", d, ffn)


def models() -> tuple[Model, ...]:
    return (
        gpt2_xl(),
        llama_3_8b(),
        qwen_2_5_7b(),
        gpt_oss_like(),
        deepseek_v3_like(stacked=True),
        deepseek_v3_like(stacked=False),
    )


def whole_model_table() -> str:
    """Whole models: share of padding, and beside it that of dim-0 sharding."""
    head = "| model | parameters, 10^9 | segments | | " + " | ".join(f"W={w}" for w in WORLDS) + " |"
    lines = [head, "|---" * (4 + len(WORLDS)) + "|"]
    for model in models():
        whole = [rows(model, world)[-1] for world in WORLDS]
        ours = " | ".join(percent(row.share) for row in whole)
        dim0 = " | ".join(percent(row.dim0_share) for row in whole)
        lines.append(f"| {model.name} | {whole[0].numel / 1e9:.2f} | {whole[0].segments} | lamina | {ours} |")
        lines.append(f"| | | | dim 0 | {dim0} |")
    return "\n".join(lines)


def unit_table(worlds: tuple[int, ...] = WORLDS) -> str:
    """One unit of each kind: elements of padding and share."""
    lines = ["| model | unit | elements | W | padding, elements | share | dim 0: elements | share |", "|---" * 8 + "|"]
    for model in models():
        for world in worlds:
            for row in rows(model, world)[:-1]:
                one = (row.numel, row.padding_numel, row.dim0_padding_numel)
                numel, padding, dim0 = (number // row.segments for number in one)
                lines.append(
                    f"| {row.model} | {row.kind} | {numel:,} | {world} | {padding:,} | {percent(row.share)} "
                    f"| {dim0:,} | {percent(row.dim0_share)} |"
                )
    return "\n".join(lines)


def percent(share: float) -> str:
    """Two significant digits; an exact zero stays `0`."""
    if share == 0:
        return "0"
    if share < 5e-6:
        return "<0.001 %"
    return f"{100 * share:.{1 if share >= 0.01 else 3}f} %"


def report() -> str:
    for model in models():
        for world in WORLDS:
            check(model, world)
    return (
        "# Padding: results\n\n"
        f"`python benchmarks/padding/run.py --write`, Python {platform.python_version()}, torch {torch.__version__}; "
        "shapes only, so the machine does not matter.\nEvery row is within the promise (`check()` in run.py ran on "
        "each).\n\n"
        f"## Whole models\n\n{whole_model_table()}\n\n## One unit of each kind\n\n{unit_table()}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace results.md")
    text = report()
    if parser.parse_args().write:
        Path(__file__).with_name("results.md").write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
