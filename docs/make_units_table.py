"""Write the table of architectures into docs/units.md: `python docs/make_units_table.py` (`--check` only compares)."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / "src"), str(DOCS.parent / "tests")]

from architectures.models import ARCHITECTURES  # noqa: E402
from lamina.errors import UnitError  # noqa: E402
from lamina.runtime.units import UnitPlan, plan_units  # noqa: E402

BEGIN, END = "<!-- table of architectures: begin -->", "<!-- table of architectures: end -->"
HEADER = (
    "| model | parameters | units | blocks | other units | largest unit | rest (root) | tied | refused |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def table() -> str:
    """One row for every architecture, in the order of `ARCHITECTURES`."""
    return "\n".join([HEADER, *(row(name) for name in ARCHITECTURES)])


def row(name: str) -> str:
    model = ARCHITECTURES[name].build()
    numel = {key: parameter.numel() for key, parameter in model.named_parameters()}
    total = sum(numel.values())
    try:
        plans = plan_units(model)
    except UnitError as error:
        return f"| {name} | {total} | | | | | | | {error} |"

    def size(plan: UnitPlan) -> int:
        return sum(numel[parameter] for parameter in plan.parameters)

    largest = max(plans, key=size)
    root = sum(size(plan) for plan in plans if not plan.name)
    others = ", ".join(f"`{plan.name}`" for plan in plans if plan.name and not plan.is_block)
    ties = sorted({f"`{slot}` = `{owner}`" for plan in plans for slot, owner in plan.aliases if slot != owner})
    blocks = sum(plan.is_block for plan in plans)
    return (
        f"| {name} | {total} | {len(plans)} | {blocks} | {others} | `{largest.title}` {size(largest)} "
        f"| {100 * root / total:.0f} % | {', '.join(ties)} | |"
    )


def with_table(page: str) -> str:
    """The page with a new table between the markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = DOCS / "units.md"
    old = path.read_text()
    new = with_table(old)
    if "--check" in sys.argv[1:]:
        sys.exit(0 if new == old else "docs/units.md is out of date; run python docs/make_units_table.py")
    path.write_text(new)
