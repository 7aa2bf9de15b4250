"""Masters whose upper halves are the weights that peers read.

Where gathers are one-sided every element lies here twice: as the fp32 master, and as the 16-bit weight that is
published. A master can be had from its weight and 16 bits more (core/halves.py), so two of the six bytes say nothing
new. But a `Shard` is its master, which users read and write at any moment, and a published weight must not change then.
Here a segment's masters have two forms:

    halved   the published range and `remainders`; where the optimizer's own step and the forwards find it
    whole    fp32 in memory of its own, as if there were no halves; what is published stays as it is

Which segments have such masters was asked for, or is chosen: see halving.py.

Note [Halved masters]
    1. `Shard.local`, and so every operation on the parameter, makes the masters whole, and they are the truth as long
       as they are: memory that was handed out may be written at any time.
    2. `publish()` halves them again, whether or not somebody has said that they were written, since it is the one
       moment at which what is published may change. `lamina.optim.AdamW` does, too, after a norm that has met all
       readers (Note [Published] 3), and then updates both halves where they lie.
    3. The whole form's memory is given back only if nobody else holds a piece of it (a kept `p.local`, a view); else
       it goes on being the truth, published anew each time, at six bytes and two more an element.
    4. In the place of the masters stands a husk of NaN without memory, so that who goes past `Shard.local` is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lamina.core.forked import refuse_shared_in_fork
from lamina.core.halves import halve, join
from lamina.core.lanes import Lane, Lanes, Mark, StreamLane
from lamina.core.layout import Segment
from lamina.core.shard_aliases import Reach
from lamina.core.shard_tensor import Shard

if TYPE_CHECKING:
    from lamina.runtime.unit import Unit


def has_halves(segment: Segment) -> bool:
    """What is computed in fp32 is published as it is."""
    return segment.compute is torch.bfloat16 and segment.master is torch.float32


def may_be_halved(segment: Segment) -> bool:
    """Frozen masters stay what they came as, until they train."""
    return segment.trainable and has_halves(segment)


class HalvedMaster:
    """The masters of one segment on this rank."""

    def __init__(self, whole: Tensor, weights: Tensor, lanes: Lanes) -> None:
        """`whole`: (S,) float32, to which nobody else may refer; `weights`: (S,) bfloat16, the published range."""
        self.whole: Tensor | None = whole
        self.numel = whole.numel()
        self.remainders = torch.empty(self.numel, dtype=torch.int16, device=whole.device)
        self.husk = whole.new_full((1,), torch.nan).expand(self.numel)  # Note [Halved masters] 4
        self.was_touched = False  # made whole, since somebody has last looked
        self.stand_on(weights, lanes)

    def stand_on(self, weights: Tensor, lanes: Lanes) -> None:
        """Halve into `weights` from now on. They must be whole."""
        assert self.whole is not None and weights.numel() == self.numel
        self.weights, self.lanes = weights, lanes
        self._halved: Mark | None = None  # on the lane that did it

    @property
    def nbytes(self) -> int:
        """Beside the published range."""
        return self.remainders.nbytes + (0 if self.whole is None else self.whole.nbytes)

    def make_whole(self) -> Tensor:
        """The masters themselves, (S,) float32. Queued on compute."""
        if self.whole is None:
            refuse_shared_in_fork("halves of these parameters")
            self.was_touched = True
            with torch.inference_mode(False), torch.no_grad():
                self.await_halved()
                whole = torch.empty(self.numel, dtype=torch.float32, device=self.remainders.device)
                join(self.weights, self.remainders, whole)
                self.whole = whole
        return self.whole

    def make_halves(self, lane: Lane) -> bool:
        """Publish the masters and keep what is left; whether the whole is gone. Queued on `lane`, which is running.

        Nobody may be reading the published range.
        """
        lane.wait(self._halved)
        if self.whole is None:
            return True
        with torch.inference_mode(False), torch.no_grad():
            halve(self.whole, self.weights, self.remainders)
        self._halved = lane.mark()
        if isinstance(lane, StreamLane) and lane.stream is not None:
            self.whole.record_stream(lane.stream)  # its memory was taken on compute
        if _is_held(self.whole):
            return False
        self.whole = None
        return True

    def retire(self) -> Tensor:
        """The masters themselves, which nobody will halve again; what was handed out of them stays a part of them.

        They must be whole.
        """
        assert self.whole is not None
        self.await_halved()  # whose memory is given back
        self.remainders = self.weights = torch.empty(0)
        return self.whole

    def await_halved(self) -> None:
        """What compute does next comes after the last halving."""
        self.lanes.compute.wait(self._halved)

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) as float32; a copy where they are halved. Queued on compute."""
        if self.whole is not None:
            return self.whole[start:stop]
        self.await_halved()
        numbers = torch.empty(stop - start, dtype=torch.float32, device=self.remainders.device)
        join(self.weights[start:stop], self.remainders[start:stop], numbers)
        return numbers

    def write(self, start: int, numbers: Tensor) -> None:
        """Elements from `start` on, of halved masters that no peer is reading. Queued on compute."""
        assert self.whole is None
        stop = start + numbers.numel()
        halve(numbers, self.weights[start:stop], self.remainders[start:stop])


class HalvedPlace(Reach):
    """The way from a parameter's `Shard` to its elements."""

    __slots__ = ("master", "start", "stop")
    passes_on = True

    def __init__(self, master: HalvedMaster, start: int, stop: int) -> None:
        super().__init__()
        self.master, self.start, self.stop = master, start, stop

    def open(self, local: Tensor) -> Tensor:
        return self.master.make_whole()[self.start : self.stop]


def take_apart(unit: Unit, lanes: Lanes) -> None:
    """Let the published ranges of a unit be halves of its masters, from the next `publish()` on."""
    made = {}
    with torch.inference_mode(False), torch.no_grad():
        for number, segment in enumerate(unit.layout.segments):
            if number in unit.halved:
                unit.halved[number].stand_on(unit.published[number], lanes)
            elif may_be_halved(segment):
                made[number] = HalvedMaster(unit.masters[number], unit.published[number], lanes)
        for number, master in made.items():  # for all of which there is memory
            unit.halved[number] = master
            _lie_in(unit, number, master.husk, master)


def put_together(unit: Unit) -> None:
    """Undo `take_apart`. Its masters are to be published anew."""
    for master in unit.halved.values():
        master.make_whole()  # if there is no memory for one, nothing has changed
    with torch.inference_mode(False), torch.no_grad():
        for number in list(unit.halved):
            _lie_in(unit, number, unit.halved.pop(number).retire(), None)


def _lie_in(unit: Unit, number: int, memory: Tensor, halved: HalvedMaster | None) -> None:
    """Let the parameters of segment `number` be parts of this memory, or reached through what is halved."""
    index, segment = unit.mesh.range_index, unit.layout.segments[number]
    first = sum(len(before.params) for before in unit.layout.segments[:number])
    unit.masters[number] = memory
    for i in range(len(segment.params)):
        start, stop = segment.owned(i, index)
        offset = segment.offset_in_range(i, index)
        place = slice(offset, offset + stop - start)
        param = unit.params[first + i]
        assert isinstance(param, Shard)
        param._local = unit.locals[first + i] = memory[place]
        param._reach = None if halved is None else HalvedPlace(halved, place.start, place.stop)


def _is_held(tensor: Tensor) -> bool:
    """Whether another tensor lies in its memory."""
    storage = tensor.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)  # type: ignore[attr-defined]  # `tensor`, `storage`
