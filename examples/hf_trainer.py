"""transformers' own Trainer on a sharded model: a mixin, and a run of it.

    python examples/hf_trainer.py                                  # a tiny Llama, 2 CPU processes or every GPU
    python examples/hf_trainer.py --model smollm2/model --text smollm2/plays/hamlet.txt
    torchrun --nproc-per-node 8 examples/hf_trainer.py --model ... # ranks that torchrun has started
    python examples/hf_trainer.py --resume                         # from the newest checkpoint in the output folder

The Trainer knows DDP, FSDP and DeepSpeed by name. `LaminaTrainer` needs none of these: it shards the model before the
Trainer sees it, and says how a sharded model is saved and loaded. Optimizer, schedule, clipping, logging and evaluation
stay the Trainer's. Needs `pip install "lamina[hf]"`, which brings accelerate: the Trainer does not start without it.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import lamina

BLOCK = 64  # tokens of a row of the tiny model's text


class LaminaTrainer:
    """Goes before `Trainer`, or a Trainer made of it; `sharding` holds the arguments of `lamina.shard`."""

    def __init__(self, model: nn.Module, *args: Any, sharding: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(lamina.shard(model, **(sharding or {})), *args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model  # would put DDP around it
        self.accelerator.prepare_model = lambda model, **_: prepare(model, device_placement=False, evaluation_mode=True)

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        with lamina.accumulate(self.model, last=self.accelerator.sync_gradients):  # `model` may be compiled, around it
            return super().training_step(model, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """A folder that `from_pretrained` reads, or more in one; every rank writes its part."""
        folder = Path(output_dir or self.args.output_dir)
        lamina.export(folder / "export", self.model)  # of its own: the Trainer writes where other things lie, too
        if self.args.should_save:
            for file in (folder / "export").iterdir():
                file.replace(folder / file.name)
            (folder / "export").rmdir()
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        lamina.save(os.path.join(output_dir, "lamina"), self.model, self.optimizer.optimizer, extra=extra)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The weights come with the optimizer's state, below."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            extra = lamina.load(os.path.join(checkpoint, "lamina"), self.model, self.optimizer.optimizer)
            self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_best_model(self) -> None:
        lamina.load(os.path.join(self.state.best_model_checkpoint, "lamina"), self.model)


class ShardedTrainer(LaminaTrainer, Trainer):
    """What the mixin is for."""


def tiny_llama() -> nn.Module:
    """Over bytes; the same weights on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def rows_of(tokens: list[int], length: int) -> list[dict[str, torch.Tensor]]:
    """Text cut into rows of one length, each its own label."""
    rows = torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)  # [rows, length]
    return [{"input_ids": row, "labels": row} for row in rows]


def train(options: argparse.Namespace) -> list[float]:
    """On every rank; the loss of each step."""
    if options.model is None:
        text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_bytes()
        model, tokenizer, rows = tiny_llama(), None, rows_of(list(text), BLOCK)
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        rows = rows_of(tokenizer(Path(options.text).read_text())["input_ids"], 256)
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        learning_rate=5e-5 if options.model else 1e-3,
        logging_steps=1,
        save_steps=options.save_every,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = ShardedTrainer(
        model, arguments, train_dataset=rows, processing_class=tokenizer, sharding={"strategy": options.strategy}
    )
    trainer.train(resume_from_checkpoint=options.resume or None)
    trainer.save_model()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face folder (default: a tiny random Llama over bytes)")
    parser.add_argument("--text", help="a text file, with --model")
    parser.add_argument("--output", default="runs/hf_trainer")
    parser.add_argument("--strategy", default="zero3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4, help="rows per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--nprocs", type=int, default=None)
    options = parser.parse_args(argv)
    if options.model is not None and options.text is None:
        parser.error("--model needs --text")
    return options


if __name__ == "__main__":
    options = parse()
    lamina.launch(train, options.nprocs, (options,))
