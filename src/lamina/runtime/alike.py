"""What every rank does alike, compared without a wait: clearing gradients, stepping with the same settings.

`if loss < best: optimizer.zero_grad()`, a scheduler that follows this rank's own validation loss, a step that is left
out where this rank's loss is not finite: ranks go on in the same order of collectives, and train apart without an
error.

Behind the used-flags of every backward (see `Flags`) travels one checksum of such things, as its maximum and that of
its negative. Nobody waits for it: it is looked at when the next backward sends its own, on all ranks at once. An error
comes one step late, but it comes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from lamina.core.control import Control, name_ranks
from lamina.errors import Disagreement
from lamina.runtime.unit import Unit


class Facts(NamedTuple):
    """What one backward has found."""

    complete: tuple[int, ...]  # units that were reduced
    had: tuple[bytes, ...]  # by unit: which parameters had a gradient before
    steps: str  # of optimizers, in words


class Alike:
    """Of one sharded model: what the last backward has found on this rank."""

    def __init__(self, units: Sequence[Unit], control: Control) -> None:
        self.units, self.control = units, control
        self._last = self._before = Facts((), (), "")

    def fingerprint(self, complete: Sequence[int]) -> int:
        """Of the backward whose reductions have just ended; fits into 31 bits."""
        share = self.units[0].mesh.share
        had = tuple([bytes(self.units[index].gradients.had) for index in complete])
        said = f"{share.steps} steps, the last with {share.settings}" if share.steps else "no step"
        self._before, self._last = self._last, Facts(tuple(complete), had, said)
        return zlib.crc32(b"".join(had), share.steps_sum) & 0x7FFFFFFF

    def refuse(self) -> NoReturn:
        """All ranks have seen that something was not alike in the backward before. Collective."""
        before = self._before
        texts = self.control.exchange_text("\n".join([before.steps, *(had.hex() for had in before.had)]))
        rows = [text.split("\n") for text in texts]
        if len({row[0] for row in rows}) > 1:
            said = "; ".join(
                f"{name_ranks([r for r, row in enumerate(rows) if row[0] == text])}: {text}"
                for text in dict.fromkeys(row[0] for row in rows)
            )
            raise Disagreement(
                f"ranks have not made the same optimizer steps before the last backward, and train apart: {said}. "
                "Step on all ranks or on none, with the same settings: decide by what all ranks know (`lamina.total`, "
                "the norm that clipping returns), and give schedulers a loss that is the same everywhere"
            )
        for number, index in enumerate(before.complete):
            flags = [bytes.fromhex(row[number + 1]) for row in rows]
            for position, spec in enumerate(self.units[index].layout.params):
                having = [rank for rank, flag in enumerate(flags) if flag[position]]
                if 0 < len(having) < len(flags):
                    raise Disagreement(
                        f"before the last backward `{spec.name}` had a gradient on {name_ranks(having)} of "
                        f"{len(flags)} only: it was added to there, and begun anew elsewhere. Call `zero_grad()` on "
                        "all ranks or on none"
                    )
        raise Disagreement("ranks have not cleared gradients or made optimizer steps alike before the last backward")
