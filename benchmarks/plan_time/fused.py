"""What a compiler's own plan moves beside what a plan counts by its rule (planner/fusion.py), block by block.

    python benchmarks/plan_time/fused.py [--save benchmarks/plan_time/results/fused.md]    # no GPU, a C++ compiler

Inductor plans each block's forward and backward (on the CPU; nothing is timed) and says for each kernel that it makes
what that reads and writes. Products and attention are calls of libraries for both, and are left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._inductor import compile_fx
from torch._inductor import config as inductor
from torch._inductor.graph import GraphLowering

from lamina.planner.measure import measure
from lamina.planner.time import BACKWARD_MEMORY

LENGTH = 512
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: dict[str, Callable[[], Any]] = {
    "Llama, 2048 wide": lambda: transformers.LlamaConfig(**LLAMA, num_hidden_layers=1, vocab_size=1000),
    "Qwen2, 2048 wide": lambda: transformers.Qwen2Config(**LLAMA, num_hidden_layers=1, vocab_size=1000),
    "Gemma2, 2048 wide": lambda: transformers.Gemma2Config(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=8, num_hidden_layers=1, vocab_size=1000
    ),
    "GPT-NeoX, 2048 wide": lambda: transformers.GPTNeoXConfig(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_hidden_layers=1, vocab_size=1000
    ),
}


def counted(config: Any) -> tuple[float, float]:
    """Bytes of the block's forward and backward, by the rule."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    units = measure(model, 1, LENGTH, precision="bf16").workload.units
    block = next(unit for unit in units if "layers.0" in unit.name)
    assert block.fused_memory_bytes is not None
    return block.fused_memory_bytes, BACKWARD_MEMORY * block.fused_memory_bytes


def planned(config: Any) -> tuple[float, float]:
    """The same by inductor."""
    found = {False: 0.0, True: 0.0}

    def count(graph: Any) -> tuple[int, list[Any], list[Any]]:
        for node in graph.scheduler.nodes:
            if not node.is_extern() and type(node).__name__ != "NopKernelSchedulerNode":
                found[graph.is_backward] += node.get_read_write_buffers_sizes()
        return 0, [], []

    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    decoder: nn.Module = model.get_decoder()
    hidden = torch.randn(1, LENGTH, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    position = decoder.rotary_emb(hidden, torch.arange(LENGTH)[None])
    GraphLowering.count_bytes = count  # type: ignore[method-assign]
    inductor.fx_graph_cache = False
    inductor.cpp.simdlen = 1  # code of plain loops is enough: only its plan is looked at
    compile_fx.inductor_metrics_log.isEnabledFor = lambda level: True  # it counts for its log alone
    result = torch.compile(decoder.layers[0])(hidden, position_embeddings=position, attention_mask=None)
    output: Tensor = result if isinstance(result, Tensor) else result[0]
    output.sum().backward()
    return found[False], found[True]


def main() -> None:
    parser = argparse.ArgumentParser(description="bytes of compiled blocks")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    lines = [f"torch {torch.__version__}, {LENGTH} tokens, bf16; MB", ""]
    lines += ["| block | forward: rule | inductor | | backward: rule | inductor | |", "|---|---|---|---|---|---|---|"]
    for name, config in MODELS.items():
        pairs = zip(counted(config()), planned(config()), strict=True)
        lines.append(
            f"| {name} | " + " | ".join(f"{a / 1e6:.1f} | {b / 1e6:.1f} | {a / b - 1:+.1%}" for a, b in pairs) + " |"
        )
        torch._dynamo.reset()
    report = "\n".join(lines) + "\n"
    print(report)
    if options.save is not None:
        options.save.write_text(report)


if __name__ == "__main__":
    main()
