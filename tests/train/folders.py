"""Hugging Face folders of tiny models with a tokenizer that is made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Letters, digits and marks, one token each."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789+=:,. \n"]
    vocabulary = {token: i for i, token in enumerate(["?", *MARKS, *letters])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=MARKS[1:], unk_token="?"
    )
    fast.chat_template = template
    fast.save_pretrained(folder)


def write_llama(folder: Path, tied: bool = True, **changes: Any) -> Path:
    """Two layers; its weights are large enough for logits that differ."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        **changes,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_chat(folder: Path, count: int = 40) -> Path:
    path = folder / "chat.jsonl"
    rows = []
    for i in range(count):
        messages = [{"role": "user", "content": f"{i} + 1"}, {"role": "assistant", "content": f"= {i + 1}"}]
        rows.append(json.dumps({"messages": messages * (1 + i % 3)}))
    path.write_text("\n".join(rows))
    return path
