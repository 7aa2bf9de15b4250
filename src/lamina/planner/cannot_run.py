"""Why a model does not run without values, and what to do about it: the words of a plan's refusals.

What torch says of a tensor on meta names neither the module nor a way on. Here the first line of it is put beside the
place, and beside the nearest thing that works for its kind: values, devices named in the model, sparse gradients,
inputs that are no tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

GROUPED = "grouped_mm"  # of transformers: all experts in one product, and no look at who takes which
# What torch says where a value is read, ...
VALUES = ("meta tensor", "nonzero", "data-independent", "data-dependent", "to numpy", "Meta kernel registered")
# ... where a tensor of the model's own making lies elsewhere, ...
DEVICES = ("is not on the expected device meta", "not compiled with CUDA", "on the same device", "NVIDIA driver")
SPARSE = ("SparseTensorImpl", "sparse")  # ... and of gradients that are no plain tensors.
POSITIONS = ("max_position_embeddings", "n_positions")  # in a configuration of transformers
MOST_SAID = 160  # characters of torch's own words


def why(model: nn.Module, place: str, is_backward: bool, problem: Exception, given: Any) -> str:
    """One line for a person.

    Args:
        place: qualified name of the module that was entered last (forward), or of the unit whose backward ran.
        given: what the forward was called with.
    """
    name = type(model).__name__
    first = (str(problem).strip().splitlines() or [""])[0].rstrip(".!")
    if len(first) > MOST_SAID:
        first = first[:MOST_SAID].rsplit(" ", 1)[0] + " [...]"
    said = f"{_where(place, is_backward)}: {type(problem).__name__}{': ' if first else ''}{first}"
    if _says(problem, DEVICES):
        return (
            f"{name} does not run without a device: {said}. The model names a device where it makes or moves a tensor; "
            "make it where the input lies (device=x.device), or a buffer (register_buffer)"
        )
    if _says(problem, VALUES):
        return (
            f"{name} cannot run without values: {said}. What reads values (.item(), numpy, nonzero, a branch on a "
            f"tensor) has none here. {_parts(model, place)}"
            + (f"; experts run as experts_implementation={GROUPED!r}" if "expert" in place else "")
        )
    if is_backward and _says(problem, SPARSE):
        return f"{name} has sparse gradients: {said}. lamina shards dense ones: give its embeddings sparse=False"
    if (positions := _too_few_positions(model, given)) is not None:
        return (
            f"{name} does not run, {said}. Its configuration has {positions} positions: type --seq {positions}, or less"
        )
    if is_backward:
        return f"the backward of {name} fails: {said}. Its forward runs, so it is its own or its loss's: try one step"
    named = given.items() if isinstance(given, Mapping) else enumerate(given)
    shapes = ", ".join(f"{k} {str(v.dtype)[6:]} {list(v.shape)}" for k, v in named if isinstance(v, Tensor))
    return (
        f"{name} does not run on the inputs of this plan ({shapes or 'none'}), {said}. A model that takes something "
        "else than tokens is given it in Python: lamina.plan(model, gpus, batch=..., seq=..., inputs={'x': tensor})"
    )


def takes_long(name: str, place: str, count: int) -> str:
    """A run that goes on, and on."""
    return (
        f"{name} has run {count:,} operations without memory, now in `{place}`, and is not done: a loop over "
        "positions, as models have whose own kernels are not installed? A plan counts such a loop as it is, and asks "
        "for it once for each kind of recomputation; a shorter --seq takes less"
    )


def no_loss(name: str, output: object) -> str:
    """The forward gave nothing that a loss can be made of."""
    return (
        f"{name} returned {type(output).__name__}, which holds no tensor to make a loss of. Return logits, or say in "
        "Python how it becomes a loss: lamina.plan(model, gpus, batch=..., seq=..., loss=lambda model, inputs: ...)"
    )


def no_gradient(name: str) -> str:
    """Parameters want gradients, and none of them would get one."""
    return (
        f"the loss of {name} depends on none of its parameters: what it returned is detached, or of whole numbers, or "
        "was computed under torch.no_grad(). A step would train nothing; return what has a gradient, or give loss="
    )


def _too_few_positions(model: nn.Module, given: Any) -> int | None:
    """How long the model's configuration says that an input may be, where one is longer."""
    config = getattr(model, "config", None)
    known = [n for n in (getattr(config, word, None) for word in POSITIONS) if isinstance(n, int) and n > 0]
    lengths = [v.shape[-1] for v in tree_leaves(given) if isinstance(v, Tensor) and v.dim() > 1]
    return known[0] if known and max(lengths, default=0) > known[0] else None


def _says(problem: Exception, words: Sequence[str]) -> bool:
    return any(word in str(problem) for word in words)


def _where(place: str, is_backward: bool) -> str:
    if is_backward:
        return f"in the backward of `{place}`" if place else "in its backward"
    return f"in `{place}` or just behind it" if place else "in its forward"


def _parts(model: nn.Module, place: str) -> str:
    """What can be planned instead: another block of a list than the one where it failed."""
    lists = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    able = [f"{name}.{key}".strip(".") for name, m in lists for key, _ in m.named_children()]
    able = [name for name in able if not f"{place}.".startswith(f"{name}.")]
    if not able:
        return "Compute it outside of the forward, or on shapes instead of values, and plan the model again"
    return (
        f"Plan the parts that run: lamina.plan(model.get_submodule({able[0]!r}), gpus, batch=..., seq=..., "
        "inputs=[what it is called with])"
    )
