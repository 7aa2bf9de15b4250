"""Models of the Hugging Face hub: read by every rank in its own ranges only, trained, and written as they came.

`from_pretrained` reads whole tensors on every rank before they can be split. Here the model is built without memory
(`lamina.deferred`), sharded, and each rank then copies from the safetensors files what lies in its ranges. Where the
names in the files are not the model's (transformers rewrites some architectures while loading, mixtures of experts
above all), every rank loads the whole model the usual way and keeps its part; the run says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lamina.core.shard_tensor import Shard
from lamina.errors import UsageError
from lamina.runtime.deferred import deferred
from lamina.train.lora import Rank, add_adapters

WIDE_ENOUGH = {"F64", "F32", "F16", "BF16"}  # in the words of safetensors
COMPUTED = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")
DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}  # of masters


@dataclass
class Pretrained:
    """A model that is about to be sharded, or has been."""

    name: str
    folder: Path
    model: nn.Module
    tokenizer: Any
    dtype: torch.dtype  # of its files
    files: dict[str, Path] | None  # parameter or buffer -> where its values lie; None: they have been read
    adapted: list[str] = field(default_factory=list)

    @property
    def left_out(self) -> list[str]:
        """Tensors of its files that have no place in the model (tables that models of old computed and saved aside)."""
        known = self.model.state_dict(keep_vars=True)
        return [n for n in self.files or () if n not in known and not n.endswith(COMPUTED)]

    def large_head(self, vocabulary: int) -> nn.Module | None:
        """The output layer, if it has that many words at least."""
        head = output_layer(self.model)
        weight = getattr(head, "weight", None)
        return head if isinstance(weight, Tensor) and weight.shape[0] >= vocabulary else None


def output_layer(model: Any) -> nn.Module | None:
    return model.get_output_embeddings()


def open_folder(name: str) -> Path:
    """The folder of a model, fetched from the hub if it is none of ours."""
    folder = Path(name).expanduser()
    if folder.is_file():
        also = ": transformers reads it with gguf_file=, and writes one" if folder.suffix == ".gguf" else ""
        raise UsageError(
            f"--model {name} is a file, wanted the folder that holds config.json, safetensors and tokenizer{also}"
        )
    if folder.is_dir():
        found = next((f for f in (folder, folder / "model") if (f / "config.json").is_file()), None)  # or of a run
        if found is None:
            adapts = any((f / "adapter_config.json").is_file() for f in (folder, folder / "adapter"))
            if adapts:
                raise UsageError(f"--model {name}: the folder holds an adapter alone: give the model that it adapts")
            raise UsageError(f"--model {name}: the folder has no config.json, so it is no model of Hugging Face's")
        return found
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise UsageError(f"--model {name}: there is no such folder, and hub names have the form owner/name")
    hub = _transformers_part("huggingface_hub")
    try:
        return Path(
            hub.snapshot_download(name, allow_patterns=["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"])
        )
    except Exception as problem:
        raise UsageError(
            f"--model {name}: no folder of that name here, and the hub did not give it: {str(problem).splitlines()[0]}"
        ) from None


def check_reading(opened: Pretrained, length: int, words: int) -> None:
    """Before any work: positions and words beyond a model's tables would be an index error, on GPUs a dead device."""
    positions = getattr(opened.model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < length:
        raise UsageError(
            f"batches.length={length}: {opened.name} was made for {positions} positions: type --length {positions}"
        )
    table = cast(Any, opened.model).get_input_embeddings().weight.shape[0]
    if words > table:
        raise UsageError(
            f"{opened.folder}: its tokenizer gives the number {words - 1} to a word of these data, and the model has "
            f"{table} words: they are not of one model, or the embeddings have to be resized"
        )


def _transformers_part(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f'--model needs {name}: pip install "lamina[hf]"') from None


def open_pretrained(name: str, rank: Rank | None, seed: int, precision: str) -> Pretrained:
    """Build the model without memory, with its tokenizer. Raises `UsageError` for what is missing or unknown."""
    folder = open_folder(name)
    transformers = _transformers_part("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = _config(transformers, folder)
    tokenizer = _tokenizer(transformers, folder)
    files = weight_files(folder)
    dtype = getattr(config, "dtype", None) or torch.float32
    model = _build(transformers, config, seed, DTYPES[precision], rank)
    opened = Pretrained(name, folder, model[0], tokenizer, dtype, files, model[1])
    if files is None or _unnamed(opened.model, files):
        loaded = _load_whole(transformers, folder, DTYPES[precision])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = [] if rank is None else add_adapters(loaded, output_layer(loaded), rank)
        opened = Pretrained(name, folder, loaded, tokenizer, dtype, None, adapted)
    return opened


def _config(transformers: Any, folder: Path) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception as problem:
        raise UsageError(f"{folder / 'config.json'}: {_first_line(problem)}") from None
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(
            f"{folder}: `{config.model_type}` reads one text and writes another; `lamina train` predicts the next "
            "token of one, and would drop its encoder. lamina.shard() takes it in a script of your own"
        )
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        how = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise UsageError(
            f"{folder}: its weights are quantised ({how or 'see quantization_config'}), numbers that mean nothing "
            "without their scales: give a folder of the same model in 16 or 32 bits"
        )
    known = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in known:
        raise UsageError(
            f"{folder}: `{config.model_type}` is no architecture that predicts the next token, as transformers "
            f"{transformers.__version__} knows them; lamina.shard() takes any module in a script of your own"
        )
    return config


def _tokenizer(transformers: Any, folder: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as problem:
        raise UsageError(
            f"{folder} has no tokenizer that transformers can read ({_first_line(problem)}): put the model's "
            "tokenizer.json and tokenizer_config.json there"
        ) from None


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]


def _build(
    transformers: Any, config: Any, seed: int, dtype: torch.dtype, rank: Rank | None
) -> tuple[nn.Module, list[str]]:
    from transformers.initialization import no_init_weights

    with deferred(seed=seed):
        with no_init_weights():
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()  # which no_init_weights has left out
        for parameter in model.parameters():
            parameter.data.zero_()  # instead of random numbers that the files would replace
        adapted = [] if rank is None else add_adapters(model, output_layer(model), rank)
    return model, adapted


def _load_whole(transformers: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.train()  # it comes without dropout, as for use
    except Exception as problem:
        raise UsageError(f"{folder}: the weights cannot be read: {_first_line(problem)}") from None


# -- ranges of files


def weight_files(folder: Path) -> dict[str, Path] | None:
    """Which file holds which tensor; None where there are no safetensors files."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            table = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError) as problem:
            raise UsageError(f"{index} is corrupt: {_first_line(problem)}") from None
        found = {name: folder / file for name, file in table.items()}
        missing = sorted({file.name for file in found.values() if not file.is_file()})
        if missing:
            raise UsageError(f"{folder}: {', '.join(missing)} missing; {index.name} names them")
        return found
    if not (single := folder / "model.safetensors").is_file():
        return None
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError) as problem:
        raise UsageError(f"{single} is corrupt: {_first_line(problem)}") from None


def _aliases(model: nn.Module) -> dict[int, list[str]]:
    """All names of each parameter and persistent buffer, by identity: tied weights have several."""
    names: dict[int, list[str]] = {}
    saved = model.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        if isinstance(tensor, Tensor):
            names.setdefault(id(tensor), []).append(name)
    return names


def _unnamed(model: nn.Module, files: dict[str, Path]) -> list[str]:
    """Parameters that are in no file under any of their names, adapters aside."""
    return [
        names[0]
        for names in _aliases(model).values()
        if ".lora_" not in names[0] and not any(name in files for name in names)
    ]


def fill(opened: Pretrained) -> int:
    """Copy this rank's ranges from the files into the sharded model; how many bytes were read.

    `lamina.load` of such a folder wants every name to fit, or skips what does not; here adapters and derived buffers
    may be in no file, but a shape must not differ.

    Raises `UsageError` for a file that is corrupt or holds another shape.
    """
    from safetensors import SafetensorError, safe_open

    if opened.files is None:
        return 0
    saved = opened.model.state_dict(keep_vars=True)
    handles: dict[Path, Any] = {}
    read_bytes = 0
    with torch.no_grad():
        for names in _aliases(opened.model).values():
            name = next((n for n in names if n in opened.files), None)
            if name is None:
                continue
            path, target = opened.files[name], saved[names[0]]
            try:
                if path not in handles:
                    handles[path] = safe_open(path, framework="pt").__enter__()
                read_bytes += _copy_range(handles[path], name, target, path)
            except (SafetensorError, OSError) as problem:
                raise UsageError(f"{path} is corrupt: {_first_line(problem)}") from None
    return read_bytes


def _copy_range(handle: Any, name: str, target: Tensor, path: Path) -> int:
    part = handle.get_slice(name)
    shape = tuple(part.get_shape())
    if shape != tuple(target.shape):
        raise UsageError(f"{path}: `{name}` has shape {shape}, the model wants {tuple(target.shape)}")
    if target.is_floating_point() and part.get_dtype() not in WIDE_ENOUGH:
        raise UsageError(f"{path}: `{name}` is {part.get_dtype()}, quantised: wanted 16 bits at least")
    if not isinstance(target, Shard) or not shape:
        values = handle.get_tensor(name)
        target.copy_(values)
        return values.nbytes
    if target.start == target.stop:
        return 0
    row_numel = target.numel() // shape[0]
    first, last = target.start // row_numel, -(-target.stop // row_numel)
    rows = part[first:last]  # whole rows around the range
    begin = first * row_numel
    target.local.copy_(rows.reshape(-1)[target.start - begin : target.stop - begin])
    return rows.nbytes
