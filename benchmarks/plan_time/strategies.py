"""How far apart strategies are, by forecast: Llama 2 of 7 B, 2 x 2048 tokens a GPU, H100, ms a step.

    python benchmarks/plan_time/strategies.py    # no GPU

Nothing here was measured: it is the table of docs/plan-time.md, for one micro-batch and for four.
"""

from __future__ import annotations

import torch
import transformers

from lamina.planner.machine import load_machine
from lamina.planner.measure import measure
from lamina.planner.time import forecast_time
from lamina.planner.workload import Choice

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
WORLDS = (8, 64, 512, 4096)


def main() -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig())
    workload, machine = measure(model, 2, 2048, precision="bf16").workload, load_machine("h100")
    words = [*STRATEGIES, *(f"x 4: {name}" if name == STRATEGIES[0] else name for name in STRATEGIES)]
    print(f"| GPUs | {' | '.join(words)} |\n|{'---|' * (1 + len(words))}")
    for world in WORLDS:
        times = [
            forecast_time(workload, Choice(name, world, 8 if name == "hsdp" else None, accumulation=count), machine)
            for count in (1, 4)
            for name in STRATEGIES
        ]
        print(f"| {world} | {' | '.join(f'{time.total_ms:.0f}' for time in times)} |")


if __name__ == "__main__":
    main()
