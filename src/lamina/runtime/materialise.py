"""Full values for parameters that are on meta, one unit at a time.

torch's own recipe is `to_empty`, then `reset_parameters` on every module. It empties buffers that nothing fills again,
draws numbers that depend on the order of the work, and leaves what has no `reset_parameters` as the allocator gave it.

Here a parameter's value comes from the first source that it has:

1. what `lamina.deferred()` recorded (equal to building the model in one process);
2. the initialiser of its module: `_init_weights` (Hugging Face), else `reset_parameters` / `_reset_parameters`, run on
   real tensors of this unit alone, on the CPU, with a stream that depends on the seed and the module's name only;
3. none: `InitialisationError`. Memory holds a canary first, so elements that nobody wrote are found, not trusted.

Either way every rank computes the full value and the same one; the caller keeps its share and drops the rest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lamina.errors import InitialisationError
from lamina.runtime.init_program import Ref, unwritten_numel
from lamina.runtime.recorder import forget, recorded
from lamina.runtime.side_by_side import replay_each

Source = Literal["deferred", "reset_parameters", "_init_weights", "given"]
NamedParameters = list[tuple[str, nn.Parameter]]

_CURE = "build the model inside `with lamina.deferred():`, or give the class a `reset_parameters` that sets it"
_CANARY_BYTE = 0xA5  # for types without NaN


@dataclass(frozen=True)
class InitRecord:
    """What initialised one parameter or buffer; a line of `lamina.report()`."""

    name: str
    source: Source


@dataclass(frozen=True)
class Materialised:
    """The full values of one unit."""

    values: dict[str, torch.Tensor]  # by qualified name; contiguous, detached, of the parameter's shape and dtype
    records: tuple[InitRecord, ...]


def materialise(
    module: nn.Module, named_parameters: NamedParameters, device: torch.device | str, seed: int = 0
) -> Materialised:
    """Full values of one unit's parameters.

    `module` is the whole model, the names are qualified in it. Parameters stay as they are; meta buffers of the modules
    that an initialiser was run on become real, on `device`. A recording is used up. Raises `InitialisationError`.
    """
    device = torch.device(device)
    values: dict[str, torch.Tensor] = {}
    sources: dict[str, Source] = {}
    unrecorded: NamedParameters = []
    recorded_refs: dict[str, Ref] = {}
    for name, parameter in named_parameters:
        if isinstance(parameter, UninitializedParameter):
            raise InitialisationError(f"`{name}` belongs to a lazy module and has no shape yet; run one forward first")
        if not parameter.is_meta:
            values[name], sources[name] = parameter.detach().to(device), "given"
        elif recorded(parameter) is not None:
            recorded_refs[name], sources[name] = _checked(name, parameter), "deferred"
        else:
            unrecorded.append((name, parameter))
    by_name = dict(named_parameters)
    for name, value in _replayed(recorded_refs):
        values[name] = value.to(by_name[name].dtype).to(device)
    records = []
    if unrecorded:
        fresh = _initialised(module, unrecorded, device, seed)
        values |= fresh.values
        sources |= {record.name: record.source for record in fresh.records}
        records = [record for record in fresh.records if record.name not in fresh.values]  # buffers
    order = [name for name, _ in named_parameters]
    for _, parameter in named_parameters:
        forget(parameter)  # all or nothing: an error above leaves every recording in place
    return Materialised({n: values[n] for n in order}, (*(InitRecord(n, sources[n]) for n in order), *records))


def materialise_buffers(module: nn.Module, device: torch.device | str, seed: int = 0) -> tuple[InitRecord, ...]:
    """Fill the meta buffers that no unit's initialiser filled, in place; to be called after the last unit.

    Raises `InitialisationError` for a buffer that nothing fills, such as a rotary table computed in `__init__` on meta.
    """
    return _initialised(module, [], torch.device(device), seed, all_buffers=True).records


def _checked(name: str, parameter: nn.Parameter) -> Ref:
    recording = recorded(parameter)
    assert recording is not None
    if parameter._version != recording.version:
        raise InitialisationError(
            f"`{name}` was written to after the `with lamina.deferred():` block had ended; it has no memory there and "
            "the write is lost: initialise it inside the block"
        )
    ref = recording.value
    if ref.size != tuple(parameter.shape):
        raise InitialisationError(
            f"`{name}` had shape {ref.size} when `lamina.deferred()` ended and now has {tuple(parameter.shape)}; "
            "change shapes inside the block"
        )
    missing_numel = unwritten_numel(ref)
    if missing_numel:
        raise InitialisationError(
            f"{missing_numel} of the {parameter.numel()} elements of `{name}` were left as `torch.empty` gave them; "
            "initialise them in the constructor, inside `with lamina.deferred():`"
        )
    return ref


def _replayed(refs: dict[str, Ref]) -> Iterator[tuple[str, torch.Tensor]]:
    storages = replay_each([ref.node for ref in refs.values()])
    for name, ref in refs.items():
        try:
            value = ref.on(next(storages))
        except InitialisationError as error:
            raise InitialisationError(f"`{name}` cannot be computed: {error}") from error
        # A parameter that is a part of a larger storage must not keep the rest alive.
        whole = value.is_contiguous() and value.numel() * value.itemsize == value.untyped_storage().nbytes()
        yield name, value if whole else value.contiguous().clone()


# -- initialisers of modules

# By qualified name: the dict of a module that holds the tensor, and the key in it. An initialiser may replace tensors.
_Slots = dict[str, tuple[dict[str, Any], str]]


@dataclass(frozen=True)
class _Site:
    """A module of the model that holds parameters of the unit, itself or further down (or meta buffers)."""

    path: str
    module: nn.Module
    targets: tuple[str, ...]  # the unit's parameters that are registered here first, and the meta buffers
    within: bool  # no parameter below it belongs to another unit


def _initialised(
    root: nn.Module, named: NamedParameters, device: torch.device, seed: int, all_buffers: bool = False
) -> Materialised:
    names = {id(parameter): name for name, parameter in named}
    sites = _sites(root, names, all_buffers)
    sources: dict[str, Source] = {}
    with _placed(root, names) as slots, _buffers_placed(sites) as buffers:
        slots |= buffers
        for site in sites:
            _run_initialisers(root, site, slots, seed, next(iter(slots), ""), sources)
        for name, (held, key) in slots.items():
            left_numel = _left(held[key])
            if left_numel:
                raise InitialisationError(_nothing_sets(root, name, left_numel, held[key].numel(), name in buffers))
        values = {name: slots[name][0][slots[name][1]].detach().to(device) for name, _ in named}
        for held, key in buffers.values():
            held[key] = held[key].to(device)
    return Materialised(values, tuple(InitRecord(name, sources.get(name, "reset_parameters")) for name in slots))


def _run_initialisers(
    root: nn.Module, site: _Site, slots: _Slots, seed: int, unit: str, sources: dict[str, Source]
) -> None:
    """Run what the class offers, `_init_weights` first: often it sets everything, and then nothing runs twice."""

    def missing() -> list[str]:
        return [name for name in site.targets if _left(slots[name][0][slots[name][1]])]

    # Where a call also reaches parameters of other units (on meta now), its stream must differ between the units.
    stream = site.path if site.within else f"{site.path}/{unit}"
    reset = getattr(site.module, "reset_parameters", None) or getattr(site.module, "_reset_parameters", None)
    outer = _init_weights_of(root, site.path)
    if outer is not None:
        _seeded(seed, stream + "/_init_weights", lambda: outer(site.module))
        left = missing()
        sources |= {name: "_init_weights" for name in site.targets if name not in left}
        if not left or not callable(reset):
            return
    if callable(reset) and (site.targets or site.within):
        _seeded(seed, stream, reset)
        sources |= {name: "reset_parameters" for name in site.targets if name not in sources}
        if outer is not None:  # it has the last word, as it has when the model is built
            _seeded(seed, stream + "/_init_weights", lambda: outer(site.module))


def _init_weights_of(root: nn.Module, path: str) -> Callable[[nn.Module], object] | None:
    """The `_init_weights` of the nearest enclosing module that has one (nested pretrained models have their own)."""
    parts = path.split(".") if path else []
    for length in range(len(parts), -1, -1):
        method = getattr(root.get_submodule(".".join(parts[:length])), "_init_weights", None)
        if callable(method):
            return method
    return None


def _seeded(seed: int, stream: str, call: Callable[[], object]) -> None:
    digest = hashlib.sha256(f"{seed}/{stream}".encode()).digest()
    kept = torch.random.get_rng_state()
    try:
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        with torch.no_grad(), torch.device("cpu"):
            call()
    finally:
        torch.random.set_rng_state(kept)


def _sites(root: nn.Module, names: dict[int, str], all_buffers: bool) -> list[_Site]:
    """Children before parents, the order in which constructors end."""
    first_owner: dict[int, nn.Module] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            first_owner.setdefault(id(parameter), module)
    sites: list[_Site] = []
    for path, module in _post_order(root, "", set()):
        inside = [id(p) for p in module.parameters()]
        own = [names[id(p)] for p in module._parameters.values() if id(p) in names and first_owner[id(p)] is module]
        buffers = [key for key, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not any(i in names for i in inside) and not (all_buffers and buffers):
            continue
        if not own and not buffers and not module._modules:
            continue  # only tied names: their first owner initialises them
        targets = dict.fromkeys(own) | dict.fromkeys(f"{path}.{key}" if path else key for key in buffers)
        sites.append(_Site(path, module, tuple(targets), within=all(i in names for i in inside)))
        _refuse_spanning(sites[-1])
    return sites


def _post_order(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for name, child in module.named_children():
        yield from _post_order(child, f"{path}.{name}" if path else name, seen)
    yield path, module


def _refuse_spanning(site: _Site) -> None:
    # Such a method can only be about its children, and they are never all real at once.
    if site.within or site.targets or site.module._buffers:
        return
    for method in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(site.module, method, None)):
            raise InitialisationError(
                f"`{site.path or type(site.module).__name__}.{method}` initialises parameters of several units, which "
                "are never real at the same time; build the model inside `with lamina.deferred():`"
            )


@contextmanager
def _placed(root: nn.Module, names: dict[int, str]) -> Iterator[_Slots]:
    """While open, the model holds real parameters for the unit, and nothing of other units that a call could change."""
    kept: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    slots: _Slots = {}
    for module in root.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = names.get(id(parameter))
            if name is None and parameter.is_meta and recorded(parameter) is None:
                continue  # nothing to protect: a write to it is no write
            kept.append((module._parameters, key, parameter))
            stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu" if name else "meta")
            if name is not None:
                _fill_canary(stand_in)
                # A tied name: the first owner decides, the others write to a spare.
                slots.setdefault(name, (module._parameters, key))
            module._parameters[key] = nn.Parameter(stand_in, parameter.requires_grad)
    try:
        yield slots
    finally:
        for held, key, parameter in kept:
            held[key] = parameter


@contextmanager
def _buffers_placed(sites: list[_Site]) -> Iterator[_Slots]:
    """Real memory for the meta buffers of modules whose initialisers are about to run; meta again after an error."""
    kept: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []
    slots: _Slots = {}
    for site in sites:
        for key, buffer in site.module._buffers.items():
            if buffer is not None and buffer.is_meta:
                kept.append((site.module._buffers, key, buffer))
                slots[f"{site.path}.{key}" if site.path else key] = (site.module._buffers, key)
    for held, key, buffer in kept:
        held[key] = _fill_canary(torch.empty(buffer.shape, dtype=buffer.dtype))
    try:
        yield slots
    except BaseException:
        for held, key, buffer in kept:
            held[key] = buffer
        raise


# -- canaries


def _has_nan(tensor: torch.Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1


def _fill_canary(tensor: torch.Tensor) -> torch.Tensor:
    if _has_nan(tensor):
        return tensor.fill_(float("nan"))
    tensor.view(-1).view(torch.uint8).fill_(1 if tensor.dtype is torch.bool else _CANARY_BYTE)
    return tensor


def check_sources(root: nn.Module, named_parameters: NamedParameters) -> None:
    """Raise for a meta parameter that nothing would initialise, before anything is changed."""
    for name, parameter in named_parameters:
        if not parameter.is_meta or recorded(parameter) is not None:
            continue
        parts = name.split(".")[:-1]
        owners = [root.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]
        methods = ("reset_parameters", "_reset_parameters", "_init_weights")
        if not any(callable(getattr(owner, method, None)) for owner in owners for method in methods):
            raise InitialisationError(_nothing_sets(root, name, parameter.numel(), parameter.numel(), False))


def _left(tensor: torch.Tensor) -> int:
    """How many elements still hold the canary. Exact where there is NaN; other types count only if all of them do."""
    tensor = tensor.detach()
    if _has_nan(tensor):
        return int(torch.count_nonzero(torch.isnan(tensor)))  # `sum` would widen to 8 bytes an element
    if tensor.dtype is torch.bool:
        return 0  # both values are legal
    untouched = bool((tensor.reshape(-1).view(torch.uint8) == _CANARY_BYTE).all())
    return tensor.numel() if untouched else 0


def _nothing_sets(root: nn.Module, name: str, left_numel: int, numel: int, is_buffer: bool) -> str:
    owner = root.get_submodule(name.rpartition(".")[0])
    kind = type(owner).__name__
    has = [method for method in ("reset_parameters", "_reset_parameters") if callable(getattr(owner, method, None))]
    if has:
        why = f"`{kind}.{has[0]}` leaves {left_numel} of its {numel} elements unset"
    elif is_buffer:
        why = f"nothing fills it, since `{kind}` computes it in its constructor only"
    else:
        why = f"`{kind}` has no `reset_parameters`, and no `_init_weights` around it sets it"
    return f"{'buffer ' if is_buffer else ''}`{name}` is on meta and left uninitialised: {why}; {_CURE}"
