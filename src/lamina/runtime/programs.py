"""The programs of one model: by what each is found, and at the ends of which of them ranks still meet.

Note [Ends]
    A rank that needs more than the program holds finds the others only if they wait for it at the program's end, and
    that costs an agreement. So ranks meet
    1. at the first `CLEAN_ENDS` ends of every program, and for good once any rank has left one: there, paths differ;
    2. where the program leaves out a unit that somebody may come to use (an expert, a dropped layer);
    3. in the backward of a forward that was left.
    A model whose ranks take the same path costs no agreement afterwards; a rank that leaves such a program is named.
    What decides here is the same on all ranks.
"""

from __future__ import annotations

from dataclasses import replace

from lamina.runtime.phase import Key, Kind, Phase, Recorded

CLEAN_ENDS = 16


class Programs:
    """What ranks have agreed on, by key."""

    def __init__(self, gathers_alone: bool) -> None:
        """`gathers_alone`: a missing gather needs nobody else, so only backwards have ends to meet at."""
        self.known: dict[Key, Recorded] = {}
        self._gathers_alone = gathers_alone
        self._paths_differ = False
        self._expects_more = False  # a unit was used in a forward whose program did not hold it

    def find(self, key: Key) -> Recorded | None:
        return self.known.get(key)

    def record(self, key: Key, program: Recorded) -> None:
        """What the ranks have agreed on, to be followed the next time."""
        self.known[key] = program

    def forget(self, key: Key) -> None:
        """The next time, agree anew."""
        self.known.pop(key, None)

    def clear(self) -> None:
        self.known.clear()

    def meets(self, phase: Phase) -> bool:
        """Whether ranks meet at the end of the phase's program; see Note [Ends]."""
        program = phase.recorded
        assert program is not None
        if phase.key.kind is Kind.KEEP or (phase.key.kind is Kind.FORWARD and self._gathers_alone):
            return False
        if program.is_open or program.clean_ends < CLEAN_ENDS or self._paths_differ:
            return True
        return phase.is_backward and self._expects_more

    def note_clean_end(self, key: Key) -> None:
        """Ranks have met at the end of a program that none of them had left."""
        program = self.known[key]
        self.record(key, replace(program, clean_ends=program.clean_ends + 1))

    def note_end(self, phase: Phase) -> None:
        """The phase is over."""
        self._paths_differ = self._paths_differ or phase.parted
        self._expects_more = not phase.is_backward and (self._expects_more or phase.parted)
