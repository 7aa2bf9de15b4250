"""The table of architectures in docs/units.md: what it says, and how it is read back.

The plans are computed in a moment; parity takes ranks and a minute. So a page is checked in two parts: the test of the
plans takes the page's own words for parity, and the test of parity holds every word against a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from architectures.models import ARCHITECTURES
from lamina.errors import UnitError
from lamina.runtime.units import UnitPlan, plan_units

PAGE = Path(__file__).resolve().parents[2] / "docs" / "units.md"
BEGIN, END = "<!-- table of architectures: begin -->", "<!-- table of architectures: end -->"
COLUMNS = (
    "model",
    "parameters",
    "units",
    "blocks",
    "other units",
    "largest unit",
    "rest (root)",
    "tied",
    "parity",
    "refused",
)


def with_table(page: str, parity: Mapping[str, str]) -> str:
    """The page with a new table between the markers; `parity` maps each architecture to its word."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(_row(name, parity.get(name, "")) for name in ARCHITECTURES)]
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def parity_of_page(page: str) -> dict[str, str]:
    """The words that the page has in its column of parity, by architecture."""
    table = page.partition(BEGIN)[2].partition(END)[0].strip()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")]
    column = rows[0].index("parity")
    return {row[0]: row[column] for row in rows[2:]}


def _row(name: str, parity: str) -> tuple[str, ...]:
    model = ARCHITECTURES[name].build()
    numel = {key: parameter.numel() for key, parameter in model.named_parameters()}
    total = sum(numel.values())
    try:
        plans = plan_units(model)
    except UnitError as error:
        return (name, str(total), *[""] * 6, parity, str(error).replace("|", "/"))

    def size(plan: UnitPlan) -> int:
        return sum(numel[parameter] for parameter in plan.parameters)

    largest = max(plans, key=size)
    root = sum(size(plan) for plan in plans if not plan.name)
    blocks = sum(plan.is_block for plan in plans)
    others = ", ".join(f"`{plan.name}`" for plan in plans if plan.name and not plan.is_block)
    ties = sorted({f"`{slot}` = `{owner}`" for plan in plans for slot, owner in plan.aliases if slot != owner})
    sizes = (f"`{largest.title}` {size(largest)}", f"{100 * root / total:.0f} %")
    return (name, str(total), str(len(plans)), str(blocks), others, *sizes, ", ".join(ties), parity, "")
