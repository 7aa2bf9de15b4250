"""`wait=False`: training goes on while what it had is written; errors come back; the buffer is made once."""

from __future__ import annotations

import threading
import unittest.mock
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import lamina
from checkpoint.training import UNITS, build, make_optimizer, own_bits, train
from harness import run_ranks
from lamina.checkpoint import saving
from lamina.checkpoint.background import BACKGROUND, RUNNING


class Gate:
    """Holds a function of the background up until it is opened."""

    def __init__(self, function: Any) -> None:
        self.function, self.opened, self.reached = function, threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(30)
        return self.function(*args, **kwargs)


def train_while_a_slow_disk_writes(folder: str) -> list[str]:
    model = lamina.shard(build(), "zero3", units=UNITS)
    optimizer = make_optimizer("lamina", model)
    train(model, optimizer, range(2))
    saved = own_bits(model, optimizer)
    wrong = []
    gate = Gate(saving.write_file)
    with unittest.mock.patch.object(saving, "write_file", gate):
        lamina.save(f"{folder}/a", model, optimizer, extra="a", wait=False)
        assert gate.reached.wait(30)
        losses = train(model, optimizer, range(2, 5))  # over the groups of training, with every rank's disk held up
        if Path(folder, "a").exists():
            wrong.append("published before it was written")
        gate.opened.set()
        lamina.checkpoint.finish()
    other = lamina.shard(build(seed=4), "zero3", units=UNITS)
    other_optimizer = make_optimizer("lamina", other)
    found = lamina.latest(folder)
    if found != f"{folder}/a" or lamina.load(found, other, other_optimizer) != "a":
        wrong.append(f"latest is {found}")
    if not all(map(torch.equal, own_bits(other, other_optimizer), saved)):
        wrong.append("training changed what was being saved")
    if train(other, other_optimizer, range(2, 5)) != losses:
        wrong.append("other losses")
    return wrong


def test_training_goes_on_while_a_slow_disk_writes(tmp_path: Path) -> None:
    for wrong in run_ranks(2, train_while_a_slow_disk_writes, str(tmp_path)):
        assert not wrong, wrong


def count_buffers(folder: str) -> list[Any]:
    model = lamina.shard(build(), "zero3", units=UNITS)
    optimizer = make_optimizer("torch", model)
    train(model, optimizer, range(1))
    addresses, groups = set(), set()
    for number in range(4):
        lamina.save(f"{folder}/{number}", model, optimizer, extra={"n": number}, wait=False)
        background = BACKGROUND._of[model]
        addresses.add(background.own.buffer.data_ptr())
        groups.add(len(dist.distributed_c10d._world.pg_map))
        lamina.checkpoint.keep_last(folder, 2)
    threads = [thread for thread in threading.enumerate() if thread.name == "lamina-save"]
    file_bytes = Path(folder, "3", f"rank-{dist.get_rank():05d}.safetensors").stat().st_size
    is_small = background.own.buffer.numel() + background.common.buffer.numel() <= file_bytes
    return [len(addresses), len(groups), len(RUNNING), len(threads), is_small]


def test_one_buffer_one_group_no_thread_left(tmp_path: Path) -> None:
    assert run_ranks(2, count_buffers, str(tmp_path)) == [[1, 1, 0, 0, True]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]


def errors_come_back(folder: str) -> list[str]:
    model = lamina.shard(build(), "zero1", units=UNITS)
    optimizer = make_optimizer("sgd", model)
    train(model, optimizer, range(1))
    said = []

    def fail(*args: Any) -> None:
        raise RuntimeError("no disk")

    calls = {
        "save": lambda: lamina.save(f"{folder}/b", model, optimizer),
        "load": lambda: lamina.load(f"{folder}/good", model, optimizer),
        "latest": lambda: lamina.latest(folder),
        "finish": lamina.checkpoint.finish,
    }
    lamina.save(f"{folder}/good", model, optimizer)
    for name, call in calls.items():
        with unittest.mock.patch.object(saving, "write_file", fail if dist.get_rank() == 1 else saving.write_file):
            lamina.save(f"{folder}/a", model, optimizer, wait=False)
            train(model, optimizer, range(1))  # says nothing
            try:
                call()
                said.append(f"{name}: no error")
            except lamina.CheckpointError as error:
                if "no disk (on rank 1 of 2)" not in str(error):
                    said.append(f"{name}: {error}")
        call()  # once only
    return said


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path: Path) -> None:
    for said in run_ranks(2, errors_come_back, str(tmp_path)):
        assert not said, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "good"]
