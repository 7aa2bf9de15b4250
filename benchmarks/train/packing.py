"""Which architectures of the installed transformers may share a sequence, and is the answer of `lamina train` right?

    python benchmarks/train/packing.py [NAME ...]        # about five minutes; one line an architecture

Every model for the next token that can be built in a tiny size, with weights that make logits differ: what
`check_separation` says in float64 and in bf16, and, in float64 and on longer documents than it tries (windows of 4,
chunks of 8), how far the logits of a packed document are from those it has alone. WRONG: accepted, and they differ.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import signal
import sys
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lamina.core.control import Control
from lamina.errors import UsageError
from lamina.train.objective import NextToken
from lamina.train.separation import check_separation

SECONDS, MOST_NUMEL = 20, 10_000_000
ROUTED = 1e-6  # of the largest logit: some choose experts, or scale, in fp32 whatever the model's dtype
TABLE = """
0 pad_token_id
0.0 hidden_dropout attention_dropout dropout hidden_dropout_prob attention_probs_dropout_prob resid_pdrop embd_pdrop
0.0 attn_pdrop activation_dropout
0.2 initializer_range
1 bos_token_id eos_token_id n_group topk_group first_k_dense_replace n_shared_experts mamba_n_groups
2 decoder_layers encoder_layers num_key_value_heads num_experts_per_tok linear_num_key_heads n_mamba_heads mamba_expand
3 n_layer n_layers num_layers num_hidden_layers
4 num_attention_heads n_head n_heads num_heads num_experts num_local_experts n_routed_experts conv_kernel mamba_n_heads
4 linear_num_value_heads decoder_attention_heads encoder_attention_heads sliding_window attention_window_size
8 head_dim rotary_dim state_size qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state attention_chunk_size
8 linear_key_head_dim linear_value_head_dim chunk_size mamba_chunk_size
16 moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_head qk_head_dim
32 hidden_size n_embd d_model embedding_size lru_width word_embed_proj_dim attention_hidden_size
48 intermediate_size ffn_dim d_ff n_inner decoder_ffn_dim encoder_ffn_dim vocab_size
64 max_position_embeddings n_positions n_ctx max_seq_len
"""
SIZES = {
    name: float(value) if "." in value else int(value)
    for value, names in (row.split(maxsplit=1) for row in TABLE.strip().splitlines())
    for name in names.split()
}


def build(name: str, model: str) -> Any:
    kind = transformers.CONFIG_MAPPING[name]
    known = {*inspect.signature(kind.__init__).parameters, *getattr(kind, "__dataclass_fields__", {})}
    aliases = getattr(kind, "attribute_map", {})
    config = kind(**{key: n for key, n in SIZES.items() if key in known and aliases.get(key) not in known})
    config._experts_implementation = "eager"  # the default's grouped product has no float64
    made = getattr(transformers, model)
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in made(config).parameters())
    if numel > MOST_NUMEL:
        raise ValueError(f"{numel:,} parameters")
    torch.manual_seed(0)
    built = made(config)
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.ndim >= 2 and parameter.std() < 0.05:
                parameter.normal_(0, 0.2)
    return built.eval()


def answer(of: NextToken, wide: bool) -> str:
    try:
        check_separation(of, True, wide, Control(None, 0, 1, "benchmark"), torch.device("cpu"))
    except UsageError as problem:
        return "refused" if "apart" in str(problem) else "reads ahead"
    return "accepted"


def apart(of: NextToken) -> tuple[float, float]:
    """From the logits of a document alone, beside another; and how large they are."""
    draw = torch.Generator().manual_seed(1)
    first, second = (torch.randint(5, 40, (1, n), generator=draw) for n in (11, 13))
    places = [torch.arange(n).view(1, -1) for n in (11, 13)]
    with torch.no_grad():
        packed: Tensor = of.logits(torch.cat((first, second), 1), torch.cat(places, 1))[0, 11:]
        alone = of.logits(second, places[1])[0]
    return float((packed - alone).abs().max()), float(alone.abs().max())


def line(name: str, model: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        of = NextToken(build(name, model).double())
        far, size = apart(of)
        answers = [answer(of, wide=True)]
        of.model.to(torch.bfloat16)
        answers.append(answer(of, wide=False))
    wrong = "  WRONG" if "accepted" in answers and far > ROUTED * size else ""
    return f"{name:<28} {answers[0]:<12} {answers[1]:<12} {far:9.2g} of {size:.2g}{wrong}"


def stop(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, stop)
    for name, models in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        signal.alarm(SECONDS)
        try:
            print(line(name, models if isinstance(models, str) else models[0]), flush=True)
        except Exception as problem:  # most need sizes of their own
            said = str(problem).splitlines() or [""]
            print(f"{name:<28} not tried: {type(problem).__name__}: {said[0][:70]}", flush=True)
    signal.alarm(0)


if __name__ == "__main__":
    main()
