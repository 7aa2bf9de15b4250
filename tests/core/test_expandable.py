"""Who asks torch for expandable segments, and who does not."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.core import expandable


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in expandable.NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", expandable.NAMES)
@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:64, expandable_segments:True", True),
        ("expandable_segments:False", False),
        ("expandable_segments:True,expandable_segments:False", False),
        ("max_split_size_mb:64", False),
        ("roundup_power2_divisions:[256:1,512:2],expandable_segments:True", True),
        ("", False),
    ],
)
def test_what_a_user_has_set_is_read_and_stays(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, asked: bool
) -> None:
    monkeypatch.setenv(name, text)
    assert expandable.asked_for() is asked
    before = dict(os.environ)
    with expandable.by_default():
        assert dict(os.environ) == before


def answers_of_torch(settings: list[dict[str, str]]) -> list[bool]:
    """What torch takes from an environment; it reads it once a process."""
    asks = """
import json, os, sys, torch
for setting in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(setting)
        print("expandable_segments:True" in torch._C._accelerator_getAllocatorSettings(), flush=True)
        os._exit(0)
    os.wait()
"""
    command = [sys.executable, "-c", asks, json.dumps(settings)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    return [line == "True" for line in lines]


def test_of_several_names_the_one_that_torch_reads_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [None, "", "expandable_segments:True", "max_split_size_mb:64"]
    choices = [dict(zip(expandable.NAMES, each, strict=True)) for each in itertools.product(values, repeat=3)]
    settings = [{name: value for name, value in choice.items() if value is not None} for choice in choices]
    ours = []
    for setting in settings:
        with monkeypatch.context() as patch:
            for name, value in setting.items():
                patch.setenv(name, value)
            ours.append(expandable.asked_for() is True)
    assert ours == answers_of_torch(settings)


@pytest.mark.parametrize("name", expandable.NAMES)
@pytest.mark.parametrize(
    ("text", "others"),
    [
        ("", ""),
        ("expandable_segments:False", ""),
        ("max_split_size_mb:64, expandable_segments:False,", "max_split_size_mb:64,"),
        ("roundup_power2_divisions:[256:1,>:2]", "roundup_power2_divisions:[256:1,>:2],"),
    ],
)
def test_what_is_advised_asks_for_it_and_keeps_the_rest(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, others: str
) -> None:
    monkeypatch.setenv(name, text)
    assert expandable.request() == f"{name}={others}expandable_segments:True"
    monkeypatch.setenv(*expandable.request().split("=", 1))
    assert expandable.asked_for() is True


def test_the_default_ends_with_the_command_also_by_an_error() -> None:
    assert expandable.asked_for() is None
    with pytest.raises(ValueError), expandable.by_default():
        assert os.environ[expandable.VARIABLE] == "expandable_segments:True"
        raise ValueError
    assert expandable.asked_for() is None


def test_gpus_that_do_not_map_memory_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [1, 1]

    def answer(out: Any, value: int) -> int:
        ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = value
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda out: answer(out, len(maps)),
        cuDeviceGet=lambda out, index: answer(out, index),
        cuDeviceGetAttribute=lambda out, attribute, device: answer(out, maps[device.value]),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert expandable.is_supported()
    maps[1] = 0
    assert not expandable.is_supported()


def test_where_there_is_no_driver_torch_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert expandable.is_supported()
