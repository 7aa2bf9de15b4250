"""Pretrained models: read in ranges, trained, adapted, written; and what is said about folders that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

import lamina
from architectures.models import ARCHITECTURES
from harness import expect_error, run_ranks
from lamina.core.shard_tensor import Shard
from lamina.runtime.access import sync
from lamina.runtime.api import shard
from lamina.train.chat import encode
from lamina.train.chunked_loss import ChunkedHead
from lamina.train.data import IGNORED, Batch
from lamina.train.documents import Document, read_documents
from lamina.train.export import hugging_face_state
from lamina.train.lora import Rank, add_adapters
from lamina.train.objective import NextToken, chunks_agree
from lamina.train.pretrained import Pretrained, fill, open_pretrained
from lamina.train.sample_cli import Command, written
from train.folders import write_chat, write_llama, write_tokenizer
from train.runs import changed, losses, small, train, write_text

CPU = torch.device("cpu")
CAUSAL = ["llama", "qwen3", "qwen3-moe", "gemma3", "gpt-oss", "deepseek-v3", "mixtral", "phi", "gpt2", "mamba"]
IN_RANGES = {"llama", "qwen3", "gemma3", "gpt-oss", "phi", "gpt2", "mamba"}  # the others are rewritten while loading


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


def opened(folder: Path, strategy: str = "zero3", precision: str = "fp32") -> tuple[Pretrained, NextToken]:
    model = open_pretrained(str(folder), None, 0, precision)
    shard(model.model, strategy, start="trust")
    fill(model)
    sync(model.model)
    return model, NextToken(model.model)


def tokens_of(seed: int, *shape: int) -> Tensor:
    return torch.randint(5, 40, shape, generator=torch.Generator().manual_seed(seed))


# -- reading and writing


def reads(folder: Path) -> tuple[int, int]:
    model = open_pretrained(str(folder), None, 0, "fp32")
    shard(model.model, "zero3", start="trust")
    read_bytes = fill(model)
    for parameter in model.model.parameters():
        assert isinstance(parameter, Shard)
    return read_bytes, sum(p.numel() * p.element_size() for p in model.model.parameters())


def test_each_rank_reads_its_ranges_only(llama: Path) -> None:
    for read_bytes, whole_bytes in run_ranks(2, reads, llama):
        assert read_bytes < 0.6 * whole_bytes, "half, and the rows that are cut"


def round_trips(folder: Path) -> dict[str, tuple[bool, float, float]]:
    """By architecture: whether it was read in ranges, and how far logits are from transformers' own, twice."""
    import transformers

    rank, found = dist.get_rank(), {}
    table = {a.name: a for a in (ARCHITECTURES.values() if isinstance(ARCHITECTURES, dict) else ARCHITECTURES)}
    for name in CAUSAL:
        reference = table[name].build().float().eval()
        if rank == 0:
            reference.save_pretrained(folder / name)
            write_tokenizer(folder / name)
        dist.barrier()
        tokens = tokens_of(1, 2, 12)
        with torch.no_grad():
            wanted = reference(input_ids=tokens, use_cache=False).logits
            model, objective = opened(folder / name)
            assert model.model.training, "with dropout, where it has one"
            read = float((objective.logits(tokens) - wanted).abs().max())
        state = hugging_face_state(model, model.model, rank)
        if rank == 0:
            (folder / f"{name}-again").mkdir()
            model.model.save_pretrained(folder / f"{name}-again", state_dict=state)
            again = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name}-again", dtype=torch.float32)
            with torch.no_grad():
                apart = (again.eval()(input_ids=tokens, use_cache=False).logits - wanted).abs().max()
            found[name] = model.files is not None, read, float(apart)
        dist.barrier()
    return found


def test_architectures_come_back_as_they_were(tmp_path: Path) -> None:
    found = run_ranks(2, round_trips, tmp_path, timeout=100)[0]
    for name, (in_ranges, read, again) in found.items():
        assert read < 1e-5 and again < 1e-5, name
        assert in_ranges == (name in IN_RANGES), name


# -- packing and loss


def chunked(folder: Path, strategy: str) -> float:
    """How far gradients are from those of the whole logits."""
    rank = dist.get_rank()
    tokens = tokens_of(rank, 2, 12)
    labels = tokens.roll(-1, 1)
    labels[0, :4] = IGNORED
    batch = Batch(tokens, labels, None, int((labels != IGNORED).sum()))
    gradients = []
    for in_chunks in (True, False):
        model = open_pretrained(str(folder), None, 0, "fp64")
        head = ChunkedHead(model.large_head(1), 64) if in_chunks else None
        if head is not None:
            head.chunk = 5
        shard(model.model, strategy, start="trust")
        fill(model)
        sync(model.model)
        objective = NextToken(model.model, head)
        assert head is None or chunks_agree(objective, CPU)
        objective.backward(batch, 40)
        grads = [p.grad for p in model.model.parameters()]
        gradients.append([g.full() if isinstance(g, Shard) else g for g in grads])
    return max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_a_loss_in_chunks_has_the_same_gradients(strategy: str, llama: Path, tmp_path: Path) -> None:
    untied = write_llama(tmp_path / "untied", tied=False)
    for folder in (llama, untied):
        assert max(run_ranks(2, chunked, folder, strategy)) < 1e-12


def capped() -> bool:
    import transformers

    config = transformers.Gemma3TextConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        num_key_value_heads=1,
        final_logit_softcapping=30.0,  # unseen in logits of weights as they begin
    )
    model = transformers.Gemma3ForCausalLM(config)
    head = ChunkedHead(model.get_output_embeddings(), 48)
    shard(model, "ddp", start="broadcast")
    return chunks_agree(NextToken(model, head), CPU)


def test_a_head_whose_logits_are_changed_afterwards_is_found_out() -> None:
    assert run_ranks(1, capped) == [False]


# -- runs


def tuned(folder: Path, output: Path, data: Path, **changes: Any) -> Any:
    return changed(small(data, output, model=str(folder), length=32, lr=3e-3, strategy=None), **changes)


def test_fine_tuning_ends_in_a_folder_that_transformers_loads(llama: Path, tmp_path: Path) -> None:
    import transformers

    text = write_text(tmp_path, lines=100)
    shown = run_ranks(2, train, 2, tuned(llama, tmp_path / "run", text, evaluate_batches=99))[0]
    assert "ddp: the simplest that fits" in shown
    held_out = losses(tmp_path / "run", "held_out_loss")
    assert held_out[12] < held_out[0] - 0.3
    folder = tmp_path / "run" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    words = transformers.AutoTokenizer.from_pretrained(folder)
    assert words("1 + 1")["input_ids"] == words.convert_tokens_to_ids([*"1 + 1"])
    again = run_ranks(1, train, 1, tuned(folder.parent, tmp_path / "again", text, evaluate_batches=99, steps=1))[0]
    assert f"step 0: held-out loss {held_out[12]:.3f}" in again, "the weights that were trained are those in the folder"
    assert model.config.tie_word_embeddings


def adapts(folder: Path, output: Path, data: Path) -> None:
    train(2, tuned(folder, output, data, lora="r=4", lr=0.03, strategy="zero3"))


def test_adapters(llama: Path, tmp_path: Path) -> None:
    """PEFT's names; the base as it was; and what the run learned is in the two matrices."""
    from transformers import AutoModelForCausalLM

    text = write_text(tmp_path, lines=100)
    run_ranks(2, adapts, llama, tmp_path / "run", text)
    held_out = losses(tmp_path / "run", "held_out_loss")
    assert held_out[12] < held_out[0] - 0.1
    folder = tmp_path / "run" / "adapter"
    state, told = (
        load_file(folder / "adapter_model.safetensors"),
        json.loads((folder / "adapter_config.json").read_text()),
    )
    assert told["r"] == 4 and told["lora_alpha"] == 8 and "q_proj" in told["target_modules"]
    assert "lm_head" not in told["target_modules"] and told["base_model_name_or_path"] == str(llama)
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    assert state[f"{prefix}.lora_A.weight"].shape == (4, 32) and state[f"{prefix}.lora_B.weight"].shape == (32, 4)
    assert len(state) == 2 * 7 * 2 and all(value.abs().sum() > 0 for value in state.values())
    model = AutoModelForCausalLM.from_pretrained(llama)
    with torch.no_grad():
        for name, a in state.items():
            if ".lora_A." in name:
                b = state[name.replace(".lora_A.", ".lora_B.")]
                layer = model.get_submodule(name.removeprefix("base_model.model.").partition(".lora_A")[0])
                layer.weight += 2.0 * b @ a
    model.save_pretrained(tmp_path / "merged")
    write_tokenizer(tmp_path / "merged")
    texts = [
        run_ranks(1, written, Command(str(tmp_path / n), prompt="7 + ", temperature=0.0)) for n in ("run", "merged")
    ]
    assert texts[0] == texts[1], "lamina sample puts the adapter on its model"
    again = run_ranks(1, train, 1, tuned(tmp_path / "merged", tmp_path / "again", text, steps=1))[0]
    assert f"step 0: held-out loss {held_out[12]:.3f}" in again


@pytest.mark.parametrize(
    ("name", "adapted"),
    [
        ("deepseek-v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}),
        ("mamba", {"in_proj"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
    ],
)
def test_layers_whose_adapters_others_would_not_read_are_left_alone(name: str, adapted: set[str]) -> None:
    model: Any = ARCHITECTURES[name].build()
    names = add_adapters(model, model.get_output_embeddings(), Rank(2, 4))
    assert {n.rpartition(".")[2] for n in names} == adapted


# -- conversations


def test_only_answers_are_learned(llama: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(llama)
    document = read_documents(str(write_chat(tmp_path)))[1]
    tokens, learned = encode(document, words)
    told = [t for t, is_told in zip(tokens, learned, strict=True) if is_told]
    assert words.decode(told).replace(" ", "") == "=2<|end|>=2<|end|>"
    text = encode(Document("x", "1 + 1"), words)
    assert text.tokens[-1] == words.eos_token_id and all(text.learned)


def test_a_run_on_conversations(llama: Path, tmp_path: Path) -> None:
    config = tuned(llama, tmp_path / "run", write_chat(tmp_path), steps=6, length=48)
    run_ranks(1, train, 1, config)
    assert losses(tmp_path / "run", "held_out_loss")[6] < losses(tmp_path / "run", "held_out_loss")[0]


# -- folders that are no models


def spoil(folder: Path, how: str) -> None:
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "adapter":
        (folder / "config.json").rename(folder / "adapter_config.json")
    elif how == "quantised":
        config = json.loads((folder / "config.json").read_text())
        told = {"quantization_config": {"quant_method": "fp8"}}
        (folder / "config.json").write_text(json.dumps({**config, **told}))
    elif how == "narrow":
        state = load_file(folder / "model.safetensors")
        state["model.norm.weight"] = state["model.norm.weight"].to(torch.float8_e4m3fn)
        save_file(state, folder / "model.safetensors")
    elif how == "few positions":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 31}))
    elif how == "few words":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 20}))
    elif how == "no tokenizer":
        for file in folder.glob("token*"):
            file.unlink()
    elif how == "truncated":
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif how == "missing file":
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        table = {"weight_map": {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(table))
    elif how == "shape":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    elif how == "unknown":
        (folder / "config.json").write_text(json.dumps({"model_type": "perceptron"}))
    elif how == "no language model":
        (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    elif how == "encoder and decoder":
        (folder / "config.json").write_text(json.dumps({"model_type": "bart"}))
    elif how == "no template":
        (folder / "chat_template.jinja").unlink()
        write_tokenizer(folder, template=None)
    elif how == "strange template":
        write_tokenizer(folder, template="{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}")


SPOILED = {
    "no config": ["config.json"],
    "adapter": ["adapter alone"],
    "quantised": ["quantised (fp8)", "scales"],
    "narrow": ["model.norm.weight", "F8_E4M3"],
    "few positions": ["batches.length=32", "31 positions", "--length 31"],
    "few words": ["tokenizer", "20 words"],
    "no tokenizer": ["no tokenizer", "tokenizer.json"],
    "truncated": ["model.safetensors", "corrupt"],
    "missing file": ["model-2.safetensors", "missing"],
    "shape": ["mlp", "(48, 32)", "(64, 32)"],
    "unknown": ["perceptron"],
    "no language model": ["vit", "next token"],
    "encoder and decoder": ["bart", "drop its encoder"],
    "no template": ["chat.jsonl", "no chat template"],
    "strange template": ["chat.jsonl, line", "template"],
}
FOUND_WHILE_READING = ("truncated", "missing file", "shape", "narrow")  # by each rank


def test_what_has_no_place_in_the_model_is_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    assert not open_pretrained(str(folder), None, 0, "fp32").left_out
    state = load_file(folder / "model.safetensors")
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file(state | {bias: torch.ones(32), "model.rotary_emb.inv_freq": torch.ones(4)}, folder / "model.safetensors")
    assert open_pretrained(str(folder), Rank(2, 4), 0, "fp32").left_out == [bias]


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(lamina.UsageError, match="is a file, wanted the folder.*gguf_file="):
        open_pretrained(str(tmp_path / "model.gguf"), None, 0, "fp32")


@pytest.mark.parametrize("how", SPOILED)
def test_folders_that_are_no_models_are_named(how: str, tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    spoil(folder, how)
    data = write_chat(tmp_path) if "template" in how else write_text(tmp_path)
    config = tuned(folder, tmp_path / "run", data)
    if how in FOUND_WHILE_READING:
        expect_error(2, train, 2, config, error="UsageError", contains=SPOILED[how])
    else:
        with pytest.raises(lamina.UsageError) as caught:
            train(1, config)
        assert all(word in str(caught.value) for word in SPOILED[how]), caught.value
    assert not (tmp_path / "run").exists(), "nothing half-written"


def test_a_model_that_reads_across_documents_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    write_tokenizer(tmp_path / "mamba")
    run = tuned(tmp_path / "mamba", tmp_path / "run", write_text(tmp_path), steps=2)
    expect_error(1, train, 1, run, error="UsageError", contains=("keep documents apart", "--packing padded"))
    run_ranks(1, train, 1, changed(run, packing="padded"))
