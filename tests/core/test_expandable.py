"""Who asks torch for expandable segments, and who does not."""

from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from lamina.core import expandable


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(expandable.VARIABLE, raising=False)
    monkeypatch.delenv(expandable.OLDER_NAME, raising=False)


@pytest.mark.parametrize("name", [expandable.VARIABLE, expandable.OLDER_NAME])
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


def test_the_newer_name_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(expandable.VARIABLE, "expandable_segments:False")
    monkeypatch.setenv(expandable.OLDER_NAME, "expandable_segments:True")
    assert expandable.asked_for() is False


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
