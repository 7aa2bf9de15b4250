"""Tiny random models of many families, each with a batch and a loss.

`ARCHITECTURES` maps a name to how to build the model (same weights at every call, no dropout, under 200 k parameters),
a batch of n samples as keyword arguments, and the loss of its output. Losses are means over samples of equal weight, so
the mean over ranks is the mean over the whole batch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from architectures import own

VOCABULARY = 48
LENGTH = 12
IMAGE = 16  # pixels a side
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Architecture:
    """One entry of the table."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Batch]  # (seed, samples) -> keyword arguments of the model
    loss: Callable[[Any], Tensor]


def _draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(seed: int, samples: int, length: int = LENGTH) -> Tensor:
    return torch.randint(4, VOCABULARY, (samples, length), generator=_draw(seed))


def _pixels(seed: int, samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *shape, generator=_draw(seed), dtype=torch.float64)


def causal_batch(seed: int, samples: int) -> Batch:
    return {"input_ids": _tokens(seed, samples)}


def _two_sided_batch(seed: int, samples: int) -> Batch:
    return {"input_ids": _tokens(seed, samples), "decoder_input_ids": _tokens(seed + 1, samples)}


def _in_float(build: Callable[[int, int], Batch]) -> Callable[[int, int], Batch]:
    """Floating inputs in the default dtype of the moment, so that float32 and float64 models both take them."""

    def batch(seed: int, samples: int) -> Batch:
        made = build(seed, samples)
        return {key: x.to(torch.get_default_dtype()) if x.is_floating_point() else x for key, x in made.items()}

    return batch


def _cross_entropy(output: Any) -> Tensor:
    """Against targets that depend on the position within the sample only, in the dtype of the logits."""
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    samples, classes = logits.shape[0], logits.shape[-1]
    logits = logits.reshape(samples, -1, classes)
    targets = torch.arange(logits.shape[1], device=logits.device).remainder(classes).expand(samples, -1)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _mean_square(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def _from_hub_class(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """A builder of a transformers model; nothing of transformers is imported before it is called."""

    def build() -> nn.Module:
        transformers = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        built = getattr(transformers, config)(**settings)
        built._attn_implementation = "eager"
        built._experts_implementation = "eager"  # the default's grouped product has no float64
        return _seeded(lambda: getattr(transformers, model)(built))

    return build


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build()


def _own(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: _seeded(build)


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
_HEAD = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _decoder(name: str, model: str, config: str, **settings: Any) -> Architecture:
    return Architecture(name, _from_hub_class(model, config, **{**_DECODER, **settings}), causal_batch, _cross_entropy)


def _decoders() -> list[Architecture]:
    return [
        _decoder("llama", "LlamaForCausalLM", "LlamaConfig"),
        _decoder("qwen3", "Qwen3ForCausalLM", "Qwen3Config", **_HEAD),
        _decoder("qwen3-moe", "Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_HEAD, **_EXPERTS),
        _decoder(
            "gemma3",
            "Gemma3ForCausalLM",
            "Gemma3TextConfig",
            **_HEAD,
            sliding_window=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        _decoder(
            "gpt-oss",
            "GptOssForCausalLM",
            "GptOssConfig",
            **_HEAD,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        _decoder(
            "deepseek-v3",
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            num_key_value_heads=4,
            moe_intermediate_size=16,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        _decoder(
            "mixtral",
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
        ),
        _decoder("phi", "PhiForCausalLM", "PhiConfig", resid_pdrop=0.0, embd_pdrop=0.0),
        Architecture(
            "gpt2",
            _from_hub_class(
                "GPT2LMHeadModel",
                "GPT2Config",
                vocab_size=VOCABULARY,
                n_embd=32,
                n_layer=3,
                n_head=4,
                n_positions=32,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                **_IDS,
            ),
            causal_batch,
            _cross_entropy,
        ),
        Architecture(
            "mamba",
            _from_hub_class(
                "MambaForCausalLM",
                "MambaConfig",
                vocab_size=VOCABULARY,
                hidden_size=32,
                num_hidden_layers=3,
                state_size=8,
                use_mambapy=False,
                **_IDS,
            ),
            causal_batch,
            _cross_entropy,
        ),
    ]


def _whisper_batch(seed: int, samples: int) -> Batch:
    return {"input_features": _pixels(seed, samples, 8, 32), "decoder_input_ids": _tokens(seed + 1, samples)}


def _image_classes(seed: int, samples: int) -> Batch:
    return {"pixel_values": _pixels(seed, samples, 3, IMAGE, IMAGE)}


def _llava_batch(seed: int, samples: int) -> Batch:
    tokens = _tokens(seed, samples)
    tokens[:, 1:5] = 3  # (16 / 8)^2 image tokens
    return {"input_ids": tokens, "pixel_values": _pixels(seed + 1, samples, 3, IMAGE, IMAGE)}


def _encoders() -> list[Architecture]:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    whisper = {
        **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in (("layers", 2), ("attention_heads", 4))},
        **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    }
    vision = {**encoder, "model_type": "clip_vision_model", "image_size": IMAGE, "patch_size": 8}
    return [
        Architecture(
            "bert",
            _from_hub_class(
                "BertForMaskedLM",
                "BertConfig",
                vocab_size=VOCABULARY,
                max_position_embeddings=32,
                pad_token_id=0,
                **encoder,
                **no_dropout,
            ),
            causal_batch,
            _cross_entropy,
        ),
        Architecture(
            "t5",
            _from_hub_class(
                "T5ForConditionalGeneration",
                "T5Config",
                vocab_size=VOCABULARY,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.0,
                decoder_start_token_id=0,
                pad_token_id=0,
                eos_token_id=1,
            ),
            _two_sided_batch,
            _cross_entropy,
        ),
        Architecture(
            "whisper",
            _from_hub_class(
                "WhisperForConditionalGeneration",
                "WhisperConfig",
                vocab_size=VOCABULARY,
                d_model=32,
                num_mel_bins=8,
                max_source_positions=16,
                max_target_positions=32,
                decoder_start_token_id=1,
                dropout=0.0,
                begin_suppress_tokens=None,
                suppress_tokens=None,
                **whisper,
                **_IDS,
            ),
            _in_float(_whisper_batch),
            _cross_entropy,
        ),
        Architecture(
            "vit",
            _from_hub_class(
                "ViTForImageClassification",
                "ViTConfig",
                image_size=IMAGE,
                patch_size=8,
                num_labels=5,
                **encoder,
                **no_dropout,
            ),
            _in_float(_image_classes),
            _cross_entropy,
        ),
        Architecture(
            "llava",
            _from_hub_class(
                "LlavaForConditionalGeneration",
                "LlavaConfig",
                vision_config=vision,
                text_config={**_DECODER, "model_type": "llama"},
                image_token_id=3,
                image_seq_length=4,
                vision_feature_layer=-1,
            ),
            _in_float(_llava_batch),
            _cross_entropy,
        ),
    ]


def _own_models() -> list[Architecture]:
    def tokens(seed: int, samples: int) -> Batch:
        return {"tokens": _tokens(seed, samples)}

    features = _in_float(lambda seed, samples: {"features": _pixels(seed, samples, LENGTH, 24)})
    images = _in_float(lambda seed, samples: {"image": _pixels(seed, samples, 3, IMAGE, IMAGE)})
    return [
        Architecture("lstm", _own(own.LstmClassifier), tokens, _cross_entropy),
        Architecture("multihead-attention", _own(own.AttentionReader), features, _cross_entropy),
        Architecture("transformer-encoder", _own(own.Encoder), tokens, _cross_entropy),
        Architecture("unet", _own(own.UNet), images, _mean_square),
        Architecture("tied-by-hand", _own(own.TiedByHand), tokens, _cross_entropy),
    ]


ARCHITECTURES: dict[str, Architecture] = {entry.name: entry for entry in (*_decoders(), *_encoders(), *_own_models())}
