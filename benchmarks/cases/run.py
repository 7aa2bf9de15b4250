"""The thirteen cases with FSDP2 and with lamina: `python benchmarks/cases/run.py`; README.md says how to read it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cases_of_numbers as numbers
import cases_of_paths as paths
import cases_of_recomputation as recomputation
import torch
from ranks import Outcome, Said, judge, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cases.md"
RESULTS = Path(__file__).parent / "results"
SYSTEMS = ("FSDP2", "lamina")
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Case:
    number: str
    what: str
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    world: int = 2
    tolerance: float = 1e-10
    words: tuple[str, ...] = ()  # that make an error a named one
    needs_folder: bool = False


CASES: tuple[Case, ...] = (
    Case("C01 (i)", "each rank skips another layer", paths.skip, words=("layers.",)),
    Case("C01 (ii)", "3 steps beside 2", paths.uneven, words=("step", "rank 0", "rank 1")),
    Case("C01 (ii)", "the same in a loop for unequal loaders", paths.even),
    *(Case("C02", f"tied across units, {w} ranks", paths.tied, world=w, words=("weight",)) for w in (2, 4)),
    Case("C03", "LoRA beside an int8 base, 4 ranks", paths.lora, world=4, words=("q",)),
    Case("C03", "bf16 Linear, fp32 LayerNorm in one unit", paths.narrow_and_wide, tolerance=2e-2, words=("dtype",)),
    Case("C04", "GradScaler, inf in one shard", numbers.scaler, ("2.weight",), tolerance=1e-5),
    Case("C04", "the same where rank 1 has no element", numbers.scaler, ("4.bias",), tolerance=1e-5),
    Case("C05", "unequal tokens, reduced each micro-batch", numbers.tokens, (False,)),
    Case("C05", "unequal tokens, reduced once", numbers.tokens, (True,)),
    *(
        Case(f"C06 {order}", f"{what}, checkpoint {'with' if reentrant else 'without'} reentry", paths.calls, args)
        for order, what in (
            ("(i)", "two forwards, backwards in order"),
            ("(ii)", "backwards reversed"),
            ("(iii)", "one backward of the sum"),
            ("(iv)", "retain_graph, twice"),
            ("(v)", "one output, then the other"),
        )
        for reentrant in (False, True)
        for args in [(order, reentrant)]
    ),
    *(
        Case(f"C07 {pack}", f"a unit returns {what}", paths.outputs, (pack,))
        for pack, what in (
            ("(i)", "an object of a class"),
            ("(ii)", "a dataclass"),
            ("(iii)", "a dict of a list with None"),
            ("(iv)", "a named tuple"),
            ("(v)", "a view that the parent changes in place"),
        )
    ),
    Case("C07", "post-accumulate hooks fire once a backward", paths.gradient_hooks),
    *(
        Case("C08", f"Linear(5, 3) on {w} rank{'s' * (w > 1)}, Adam {way}", numbers.lone_linear, (way,), world=w)
        for w, way in ((4, "foreach"), (4, "for-loop"), (1, "foreach"))
    ),
    Case("C08", "ranks 1 and 3 of four, the others gone", numbers.part_of_the_ranks, world=4),
    Case("C09", "a start from meta is alike on 1, 2 and 3 ranks", numbers.deferred, world=3, tolerance=0.0),
    Case("C09", "a parameter that nothing initialises", numbers.uninitialised, words=("1.matrix",)),
    Case("C10 (i)", "rank 1 cannot write in the middle of a save", numbers.failed_save, needs_folder=True),
    Case("C10 (ii)", "a truncated file", numbers.truncated, needs_folder=True),
    Case("C10 (iii)", "adapters only, from 4 ranks", numbers.adapters, world=4, needs_folder=True),
    Case("C10 (iv)", "20 full state dicts", numbers.full_state_dicts),
    *(
        Case(f"C11 {when}", f"optimizer {what}", paths.optimizer_order, (when,), words=("0.weight",))
        for when, what in (
            ("(i)", "made before sharding"),
            ("(ii)", "made after a warm-up forward"),
            ("(iii)", "in groups by name and ndim"),
            ("(iv)", "over a subset"),
        )
    ),
    Case("C11", "moving average by zip after a forward", paths.moving_average),
    Case("C11", "p.mul_(2), then a forward", paths.edited),
    Case("C12", "inference_mode between steps", numbers.modes),
    Case("C12", "deepcopy, both train", numbers.copied, words=("deepcopy",)),
    Case("C12", "a weight edited among full parameters", numbers.edited_weight),
    Case("C12", "load_state_dict between forward and backward", numbers.loaded_between, words=("changed",)),
    *(
        Case(f"C13 {number}", f"recomputed: {what}", recomputation.recomputed, (kind,), words=words)
        for number, what, kind, words in (
            ("(i)", "running values of a batch norm", "Normed", ()),
            ("(ii)", "spectral norm", "Spectral", ()),
            ("(iii)", "a list that blocks are given and add to, as caches", "Cached", ()),
            ("(iv)", "Python's random numbers", "Jittered", ()),
            ("(v)", "a tensor in a dict, written to behind the forward", "Sum", ("blocks.",)),
        )
    ),
)


def outcome_of(case: Case, system: str) -> Outcome:
    with contextlib.ExitStack() as stack:
        folder = (stack.enter_context(tempfile.TemporaryDirectory()),) if case.needs_folder else ()
        if case.function is numbers.deferred:
            return _over_worlds([run(world, case.function, system) for world in (1, 2, 3)])
        return judge(run(case.world, case.function, system, *case.args, *folder, words=case.words), case.tolerance)


def _over_worlds(said: Sequence[Sequence[Said | None]]) -> Outcome:
    """Full tensors of every world against those of one rank."""
    for answers in said:
        if any(each is None or not isinstance(each.value, list) for each in answers):
            return judge(answers, 0.0)
    first = said[0][0].value
    others = [each.value for answers in said for each in answers]
    worst = max(float(abs(a - b).max()) for values in others for a, b in zip(values, first, strict=True))
    return judge([Said(worst)], 0.0)


def table(rows: Sequence[tuple[Case, dict[str, Outcome]]]) -> str:
    lines = ["| case | | " + " | ".join(SYSTEMS) + " |", "|---|---|" + "---|" * len(SYSTEMS)]
    for case, outcomes in rows:
        cells = [str(outcomes[name]).replace("|", "\\|").replace("\n", " ") for name in SYSTEMS]
        lines.append(f"| {case.number} | {case.what} | " + " | ".join(cells) + " |")
    words = ("right", "named error", "silently wrong", "crash", "hang", "not offered")
    totals = [
        ", ".join(f"{n} {w}" for w in words if (n := sum(o[name].word == w for _, o in rows))) for name in SYSTEMS
    ]
    return "\n".join([*lines, "| all | | " + " | ".join(totals) + " |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose number or words begin with this, such as C06")
    parser.add_argument("--system", choices=SYSTEMS, help="one of the two; prints, writes nothing")
    parser.add_argument("--write", action="store_true", help="write docs/cases.md and results/")
    arguments = parser.parse_args()
    rows, names = [], [arguments.system] if arguments.system else list(SYSTEMS)
    for case in CASES:
        if not case.number.startswith(arguments.only):
            continue
        outcomes = {name: outcome_of(case, name) for name in names}
        rows.append((case, outcomes))
        print(f"{case.number:10} {case.what:60} " + " | ".join(map(str, outcomes.values())), flush=True)
    if not arguments.write or arguments.only or arguments.system:
        return
    about = {
        "command": "python benchmarks/cases/run.py --write",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }
    found = [
        {"case": c.number, "what": c.what, "world": c.world} | {n: vars(o) for n, o in outcomes.items()}
        for c, outcomes in rows
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cases.json").write_text(json.dumps(about | {"cases": found}, indent=1) + "\n")
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    stamp = f"torch {about['torch']}, Python {about['python']}, Gloo, {about['machine']}; `{about['command']}`"
    PAGE.write_text(f"{before}{BEGIN}\n{stamp}\n\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
