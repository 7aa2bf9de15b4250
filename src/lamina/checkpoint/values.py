"""Python values as JSON: what users keep beside a model (schedulers, data positions), and optimizer options.

Pickle takes anything, runs code when it is read, and hides what it holds. So everything that JSON can say is JSON, with
a tag where Python has more kinds (tuple, set, bytes, a dict with keys that are no text); tensors and arrays are entries
of the data file; and only what is left is pickled, and listed by name.
"""

from __future__ import annotations

import base64
import functools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamina.core.shard_tensor import Shard
from lamina.errors import CheckpointError, UsageError

TAG = "$"  # a dict with this key is not a dict but what the key says
_PLAIN = (str, bool, int, float, type(None))
_JSON_BITS = 10_000  # Python reads no longer numbers from a text


@dataclass
class Encoded:
    """A value as JSON, and what does not fit in it."""

    json: Any
    tensors: list[Tensor] = field(default_factory=list)  # `{"$": "tensor", "at": i}` stands for number i
    pickled: list[str] = field(default_factory=list)  # where pickle was needed


def encode(value: Any, where: str, inline_tensors: bool = False) -> Encoded:
    """`value` as JSON. `where` names it in messages; small tensors may stand in the JSON itself (`inline_tensors`)."""
    made = Encoded(None)
    try:
        made.json = _encode(value, where, made, inline_tensors)
    except RecursionError as error:
        raise UsageError(f"{where} contains itself, or is nested too deeply to be saved") from error
    return made


def _encode(value: Any, where: str, made: Encoded, inline: bool) -> Any:
    if type(value) is int and value.bit_length() > _JSON_BITS:
        return _encode_pickled(value, where, made)
    if type(value) in _PLAIN:
        return value
    if type(value) in (dict, OrderedDict):
        return _encode_dict(value, where, made, inline)
    if type(value) in (list, tuple, set, frozenset):
        items = [_encode(item, f"{where}[{i}]", made, inline) for i, item in enumerate(value)]
        return items if type(value) is list else {TAG: type(value).__name__, "items": items}
    if isinstance(value, Shard):
        raise UsageError(
            f"{where} is the sharded {value.spec.describe()}: parameters are saved with the model. Give "
            "`p.full()` (collective), or leave it out"
        )
    if type(value) in (Tensor, torch.nn.Parameter):
        return _encode_tensor(value.detach(), where, made, inline)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        try:
            return {TAG: "array", "value": _encode_tensor(torch.from_numpy(np.array(value)), where, made, inline)}
        except TypeError:  # an array dtype that torch has not
            pass
    if type(value) is complex:
        return {TAG: "complex", "items": [value.real, value.imag]}
    if type(value) in (bytes, bytearray):
        return {TAG: type(value).__name__, "base64": base64.b64encode(value).decode()}
    if type(value) is torch.dtype:
        return {TAG: "dtype", "name": dtype_name(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {TAG: "scalar", "dtype": value.dtype.name, "value": value.item()}
    return _encode_pickled(value, where, made)


def _encode_dict(value: dict[Any, Any], where: str, made: Encoded, inline: bool) -> Any:
    if type(value) is dict and all(type(key) is str for key in value) and TAG not in value:
        return {key: _encode(item, f"{where}[{key!r}]", made, inline) for key, item in value.items()}
    pairs = [
        [_encode(key, f"a key of {where}", made, inline), _encode(item, f"{where}[{key!r}]", made, inline)]
        for key, item in value.items()
    ]
    return {TAG: type(value).__name__, "items": pairs}


def _encode_tensor(value: Tensor, where: str, made: Encoded, inline: bool) -> Any:
    check_plain(value, where)
    may_be_inline = value.numel() == 0 or (inline and value.numel() <= 16)  # data files hold no empty ones
    if may_be_inline and not value.is_complex():
        data = value.cpu()
        return {TAG: "value", "dtype": dtype_name(data.dtype), "shape": list(data.shape), "items": _numbers(data)}
    if value.is_complex():  # data files hold no complex numbers
        pairs = torch.view_as_real(value.resolve_conj())
        return {TAG: "complex tensor", "value": _encode_tensor(pairs, where, made, inline)}
    made.tensors.append(value.resolve_neg())
    return {TAG: "tensor", "at": len(made.tensors) - 1}


def _numbers(data: Tensor) -> list[Any]:
    """float64 holds every value of the narrower dtypes, and JSON writes a float64 so that it is read back exactly."""
    flat = data.reshape(-1)
    return (flat.double() if flat.is_floating_point() else flat).tolist()


def _encode_pickled(value: Any, where: str, made: Encoded) -> Any:
    try:
        data = pickle.dumps(value)
    except Exception as error:  # pickle raises whatever an object's own code raises
        raise UsageError(
            f"{where} is a {type(value).__name__}, which cannot be saved ({type(error).__name__}: {error}). Give its "
            "`state_dict()`, or numbers, lists, dicts and tensors"
        ) from error
    made.pickled.append(where)
    return {TAG: "pickle", "type": type(value).__qualname__, "base64": base64.b64encode(data).decode()}


def decode(json: Any, tensors: Sequence[Tensor] | Callable[[int], Tensor] = ()) -> Any:
    """The value again. Tensors come from the list, or from a function of their number."""
    if isinstance(json, list):
        return [decode(item, tensors) for item in json]
    if not isinstance(json, dict):
        return json
    tag = json.get(TAG)
    if tag is None:
        return {key: decode(item, tensors) for key, item in json.items()}
    if tag in ("dict", "OrderedDict"):
        pairs = {decode(key, tensors): decode(item, tensors) for key, item in json["items"]}
        return pairs if tag == "dict" else OrderedDict(pairs)
    if tag in ("tuple", "set", "frozenset"):
        kind = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag]
        return kind(decode(item, tensors) for item in json["items"])
    if tag == "tensor":
        return tensors(json["at"]) if callable(tensors) else tensors[json["at"]]
    if tag == "value":
        return torch.tensor(json["items"], dtype=dtype_of(json["dtype"])).view(json["shape"])
    if tag == "complex tensor":
        return torch.view_as_complex(decode(json["value"], tensors))
    if tag == "array":
        return decode(json["value"], tensors).numpy()
    if tag == "complex":
        return complex(*json["items"])
    if tag in ("bytes", "bytearray"):
        data = base64.b64decode(json["base64"])
        return data if tag == "bytes" else bytearray(data)
    if tag == "dtype":
        return dtype_of(json["name"])
    if tag == "scalar":
        return np.dtype(json["dtype"]).type(json["value"])
    if tag != "pickle":
        raise CheckpointError(f"a value of kind {tag!r} is unknown: a newer lamina wrote it, or it is damaged")
    return pickle.loads(base64.b64decode(json["base64"]))


def check_plain(tensor: Tensor, where: str) -> None:
    """Refuse what has no values of its own, or not one for each element."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        kind = "on meta" if tensor.is_meta else "that is nested" if tensor.is_nested else str(tensor.layout)
        kind = str(tensor.dtype) if tensor.is_quantized else kind
        raise UsageError(f"{where} is a tensor {kind}, which checkpoints do not hold: make it dense, or leave it out")


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"this torch {torch.__version__} has no dtype {name!r}")
    return found
