"""Who keeps gathered weights beyond their use: full parameters, and views of them.

Note [Kept parameters]
    1. Whoever keeps a full parameter, or a view of one (`weight.detach()`, `weight.t()`, `weight[0]`, `weight.data`),
       beyond its forward, in a list, a closure or an attribute, has other weights before him later, for the memory
       serves several units. Autograd compares versions; a plain read would be wrong without a word. So it is refused by
       name, and allowed again while a use of the unit reads its weights. Keeping alone is no error.
    2. Reads of a subclass go through Python, which costs microseconds. So a tensor becomes a `Locked` one only if
       somebody keeps it, which counts of references tell when the last use of the unit ends.
    3. A full parameter has a count of its own. What views there are is told by the count of their storage, which only
       the full parameters of one slot share. Graphs hold views, too (`weight.t()`, of every linear layer), but
       as many each time: a count for which somebody has looked and found no keeper is a clean one from then on, beside
       as many graphs. Without graphs it is exact.
    4. To look is to go through the objects that Python's collector has: the young ones, if what the use began with is
       among them. A tensor that graphs alone hold has no other reference in Python than theirs.
    5. A graph may hold the very tensor that somebody keeps, and the count is a clean one. Where nobody had kept any
       before, such a one is found when the graph has gone, at the end of the backward.
    6. What is no tensor is not seen: an array of numpy, a storage, an address.
"""

from __future__ import annotations

import bisect
import functools
import gc
import itertools
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lamina.core.full_parameter import FullParameter, LockedParameter, become, locked

LOOKS = 16  # in a row that find nothing new, before counts are trusted again
_NONE: frozenset[int] = frozenset()
_MARK = 2**32 - 2  # a version that no tensor comes to
_set_versions = torch._C._autograd._unsafe_set_version_counter
_count_in_torch: Callable[[Tensor], int] = getattr(Tensor, "_use_count", lambda tensor: 1)
_count_of_storage: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda address: 0)


def _graph_references() -> int:
    """Python's references to a tensor that stand for all of C++'s, of graphs above all: one in torch 2.13."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, device="cpu", requires_grad=True)
        alone = sys.getrefcount(leaf)
        graph = leaf * 2
        found = sys.getrefcount(leaf) - alone
    del graph
    return found


GRAPH_REFERENCES = _graph_references()
_LISTED = next(map(sys.getrefcount, [torch.zeros(0, device="cpu")]))  # references to what a list alone holds


def _python_references(tensors: Sequence[Tensor]) -> list[int]:
    """Without those that stand for C++'s."""
    counts = list(map(sys.getrefcount, tensors))  # before anything else here refers to one of them
    return [count - GRAPH_REFERENCES * (_count_in_torch(each) > 1) for each, count in zip(tensors, counts, strict=True)]


class KeptViews:
    """Views of full parameters of a slot that others than the runtime keep."""

    def __init__(self, fulls: Sequence[FullParameter], storage: int, buffer: Tensor) -> None:
        """
        Args:
            storage: address of what the full parameters share.
            buffer: the runtime's; where it shares that too, so do views of it, which have its version counter.
        """
        self._fulls, self._storage, self._buffer = fulls, storage, buffer
        self._count = functools.partial(_count_of_storage, storage) if fulls else int
        self._starts = [full.storage_offset() * full.element_size() for full in fulls]  # bytes
        self._clean = {0: {self._count()}}  # counts of the storage, by the number of graphs
        self._kept: list[tuple[weakref.ref[Tensor], type[Tensor]]] = []  # with the classes that they had
        self._are_locked = False
        self._looks = 0  # to come beside graphs, whatever the count is
        self._use: list[None] | None = None  # an object as old as the use
        self._graph: list[None] | None = None  # one as old as the first use whose graph is alive

    def _look(self, count: int, graphs: int) -> None:
        if self._are_locked or count == 0:  # 0: a torch that does not count
            return
        kept = _held([view for view, _ in self._alive()])
        if (graphs and self._looks) or not self._explain(kept, count, graphs):
            known = set(map(id, kept))
            del kept
            kept = self._find(self._use if graphs else self._graph)
            self._looks = max(0, self._looks - 1) if known.issuperset(map(id, kept)) else LOOKS
            if all(map(_is_alone, kept)):
                self._clean.setdefault(graphs, set()).add(count - len(kept))
        self._kept, self._are_locked = [], True
        for view in kept:
            self._lock(view)

    def _explain(self, kept: Sequence[Tensor], count: int, graphs: int) -> bool:
        """Whether nothing else is kept."""
        return all(map(_is_alone, kept)) and count - len(kept) in self._clean.get(graphs, _NONE)

    def _lock(self, view: Tensor) -> None:
        kind = type(view)
        try:
            become(view, locked(kind))
        except TypeError:  # its class lays memory out in another way than tensors do
            return
        place = bisect.bisect(self._starts, view.storage_offset() * view.element_size()) - 1
        vars(view)["_owner"] = vars(self._fulls[place]).get("_owner")
        self._kept.append((weakref.ref(view), kind))

    def _alive(self) -> list[tuple[Tensor, type[Tensor]]]:
        """What was kept when this was looked at last."""
        found = [(reference(), kind) for reference, kind in self._kept]
        return [(view, kind) for view, kind in found if view is not None]

    def _find(self, young: list[None] | None) -> list[Tensor]:
        """What others keep, but for what is older than `young` and was not known before."""
        ours = set(map(id, self._fulls))
        found = [*_tensors_since(young), *[view for view, _ in self._alive()]]
        views = {id(each): each for each in found if id(each) not in ours and self._lies_here(each)}
        found = list(views.values())
        del views
        if self._buffer.untyped_storage()._cdata == self._storage:
            found = self._without_ours(found)
        return _held(found)

    def _lies_here(self, tensor: Tensor) -> bool:
        try:
            return Tensor.untyped_storage(tensor)._cdata == self._storage
        except (RuntimeError, NotImplementedError):  # tensor types without storage
            return False

    def _without_ours(self, tensors: list[Tensor]) -> list[Tensor]:
        before = self._buffer._version
        _set_versions((self._buffer,), (_MARK,))
        try:
            return [each for each in tensors if each.is_inference() or each._version != _MARK]
        finally:
            _set_versions((self._buffer,), (before,))


class Keepers(KeptViews):
    """Whether others than the runtime keep full parameters of a slot, or views of them."""

    def __init__(self, fulls: Sequence[FullParameter], storage: int, buffer: Tensor) -> None:
        super().__init__(fulls, storage, buffer)
        self._locked: list[FullParameter] = []
        self.have_none()

    def have_none(self) -> None:
        """Python's references to full parameters are the runtime's."""
        self._references = _python_references(self._fulls)
        self._references_in_graphs = [count + GRAPH_REFERENCES for count in self._references]

    def lock(self, graphs: int) -> None:
        """The last use has ended: what others keep is not to be read. `graphs`: of uses of the unit, that are alive."""
        count = self._count()
        if self._kept or count not in self._clean.get(graphs, _NONE) or (graphs and self._looks):
            with torch._C.DisableTorchFunction():
                self._look(count, graphs)
        self._use = None
        if graphs == 0:
            self._graph = None
        found = list(map(sys.getrefcount, self._fulls))
        if found == self._references or found == self._references_in_graphs:
            return
        for full, count, known in zip(self._fulls, _python_references(self._fulls), self._references, strict=True):
            if count > known:
                become(full, LockedParameter)
                self._locked.append(full)

    def unlock(self) -> None:
        """A use begins."""
        if self._use is None:
            self._use = []
            if self._graph is None:
                self._graph = self._use
        if self._are_locked:
            self._are_locked = False
            for view, kind in self._alive():
                become(view, kind)
                del vars(view)["_owner"]
        while self._locked:
            become(self._locked.pop(), FullParameter)


def _held(tensors: list[Tensor]) -> list[Tensor]:
    """Those to which more refers in Python than this list, and than what stands for graphs."""
    return [each for each, count in zip(tensors, _python_references(tensors), strict=True) if count > _LISTED]


def _is_alone(tensor: Tensor) -> bool:
    """Whether no graph holds it, and no C++."""
    return _count_in_torch(tensor) == 1


def _tensors_since(young: list[None] | None) -> list[Tensor]:
    """Tensors that Python's collector has; perhaps without some that are older than `young`."""
    objects = gc.get_objects(0)
    if id(young) not in map(id, objects):
        objects += gc.get_objects(1)
        if id(young) not in map(id, objects):
            objects = gc.get_objects()
    kinds = list(map(type, objects))
    different = dict(zip(map(id, kinds), kinds, strict=True))  # classes need not be hashable
    of_tensors = {key for key, kind in different.items() if issubclass(kind, Tensor)}
    return list(itertools.compress(objects, map(of_tensors.__contains__, map(id, kinds))))
