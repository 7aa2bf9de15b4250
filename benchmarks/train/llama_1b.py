"""A Hugging Face folder of a Llama shape with 1.24 B parameters (that of Llama 3.2 1B), with random weights.

    python benchmarks/train/llama_1b.py FOLDER [smollm2]        # or that of SmolLM2-135M

The tokenizer gives every byte a token; the vocabulary keeps all its rows, so the logits cost what they would.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

SHAPE_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
SHAPE_SMOLLM2 = {
    **SHAPE_1B,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f} B parameters in {folder}")


def write_tokenizer(folder: Path) -> None:
    vocabulary = {piece: number for number, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    write_model(folder, SHAPE_SMOLLM2 if sys.argv[2:] == ["smollm2"] else SHAPE_1B)
    write_tokenizer(folder)


if __name__ == "__main__":
    main()
