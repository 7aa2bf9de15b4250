"""The models that `lamina plan` can look at, and the loss that `lamina train` would give them; no weights are read."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamina.errors import UsageError
from lamina.planner.measure import Loss
from lamina.planner.meta_run import KernelsOf, LiveBytes, on_meta
from lamina.train.chunked_loss import ChunkedHead, summed_loss, vocabulary_of
from lamina.train.config import Config
from lamina.train.export import GPT_FILE, find_gpt
from lamina.train.gpt import GPT, Shape
from lamina.train.job import LARGE_VOCABULARY
from lamina.train.lora import add_adapters, read_rank
from lamina.train.pretrained import output_layer


@dataclass(frozen=True)
class Planned:
    """A model on meta."""

    name: str
    model: nn.Module
    loss: Loss | None  # None: the model's own
    for_config: str | None  # how a configuration of `lamina train` names it; None: it has no name there


def open_planned(word: str | None, config: Config) -> Planned:
    """A Hugging Face folder or config.json, the folder of an earlier run, `module:function`, or our GPT (None).

    Raises `UsageError` for what is none of these.
    """
    if word is None:
        arch, length = config.architecture, config.batches.length
        assert arch.width and arch.layers and arch.heads and length
        with torch.device("meta"):
            model = GPT(Shape(arch.width, arch.layers, arch.heads, length))
        return Planned("small GPT", model, token_loss, None)
    path = Path(word).expanduser()
    if (folder := find_gpt(path)) is not None:
        with torch.device("meta"):
            model = GPT(Shape(**json.loads((folder / GPT_FILE).read_text())))
        return Planned(word, model, token_loss, word)
    inside = (path / "config.json", path / "model" / "config.json")  # of a model, of a run
    file = path if path.name.endswith(".json") else next((file for file in inside if file.is_file()), inside[0])
    if file.is_file():
        built = _pretrained(file, config)
        loss = token_loss if logits_are_the_heads(built) else whole_loss
        return Planned(f"{word}{_other_class(built)}", built, loss, str(file.parent))
    if ":" in word:
        return Planned(word, _called(word), None, None)
    raise UsageError(
        f"{word}: neither a folder with a config.json or {GPT_FILE}, nor a config.json, nor module:function (a "
        "function that returns an nn.Module, such as mymodels:build)"
    )


def _pretrained(file: Path, config: Config) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise UsageError(f'{file} needs transformers: pip install "lamina[hf]"') from None
    transformers.logging.set_verbosity_error()
    try:
        known = transformers.AutoConfig.from_pretrained(file)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(known, dtype=torch.float32)
    except Exception as problem:  # its checks of a configuration raise what they like
        if "Unrecognized configuration class" in str(problem):
            raise UsageError(
                f"{file}: a model of type {known.model_type} is no causal language model, which is what a folder is "
                "opened as. Plan it as module:function, or in Python: lamina.plan(model, gpus, batch=, seq=, inputs=)"
            ) from None
        raise UsageError(f"{file}: transformers does not build a model of it: {_first_line(problem)}") from None
    model.tie_weights()
    if config.lora is not None:
        with torch.device("meta"):
            add_adapters(model, model.get_output_embeddings(), read_rank(config.lora))
    return model


def _other_class(model: Any) -> str:
    """For the title, where the configuration is of another model, whose decoder this is."""
    said = (getattr(model.config, "architectures", None) or [""])[0]
    return f" (as {type(model).__name__}, not {said})" if said not in ("", type(model).__name__) else ""


def _called(word: str) -> nn.Module:
    module_name, _, function = word.partition(":")
    if (here := str(Path.cwd())) not in sys.path:  # a command's path holds its own folder, not where it is typed
        sys.path.append(here)
    try:
        build = getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as problem:
        raise UsageError(f"{word}: {problem}; type module:function, the module in this folder or on the path") from None
    except Exception as problem:
        raise UsageError(f"{word}: importing {module_name} failed: {_first_line(problem)}") from problem
    try:
        with torch.device("meta"):
            model = build()
    except TypeError as problem:
        raise UsageError(f"{word} cannot be called without arguments: {problem}") from None
    except Exception as problem:
        raise UsageError(f"{word} failed on meta, without memory: {_first_line(problem)}") from problem
    if not isinstance(model, nn.Module):
        raise UsageError(f"{word} returned a {type(model).__name__}, wanted an nn.Module")
    return model


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).strip().splitlines() or [''])[0]}"


def token_loss(model: nn.Module, inputs: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """The sum over tokens as `lamina train` computes it: a large output layer in chunks."""
    given: Any = inputs if isinstance(inputs, Mapping) else {}
    tokens = next(iter(given.values()))
    labels = torch.empty_like(tokens).flatten()
    head = output_layer(model) if hasattr(model, "get_output_embeddings") else None
    if head is not None and vocabulary_of(head) >= LARGE_VOCABULARY:
        chunked = ChunkedHead(head, vocabulary_of(head))
        chunked.labels = labels
        return model(**given).logits.sum()
    return whole_loss(model, inputs)


def whole_loss(model: nn.Module, inputs: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
    """The same where the logits are cut nowhere."""
    output = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    logits = getattr(output, "logits", output).flatten(0, 1)
    return summed_loss(logits, torch.empty(logits.shape[0], dtype=torch.long, device=logits.device))


class _BehindHead(LiveBytes):
    """Whether anything but views and casts is computed once the output layer has run."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.head_ran = self.changed = False

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any, made: bool) -> None:
        writes = func._schema.name.endswith("_")
        self.changed |= self.head_ran and (made or writes) and func is not torch.ops.aten._to_copy.default


def logits_are_the_heads(model: nn.Module) -> bool:
    """False where a model scales or caps them: `lamina train` tries it with numbers, and computes all of them then."""
    head, watch = output_layer(model), _BehindHead()
    if head is None:
        return False
    copied = on_meta(model)
    its_head = output_layer(copied)
    assert its_head is not None
    ran = its_head.register_forward_hook(lambda *_: setattr(watch, "head_ran", True))
    try:
        with KernelsOf("cuda"), torch.device("meta"), torch.no_grad(), watch:
            copied(input_ids=torch.empty(1, 8, dtype=torch.long), use_cache=False)
    except Exception:
        return True  # what is wrong with the model is said when it is measured
    finally:
        ran.remove()
    return not watch.changed
