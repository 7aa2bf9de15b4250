"""Machine files: the shipped ones are complete and honest, the text form is the data, mistakes are named."""

from __future__ import annotations

import dataclasses

import pytest

from lamina.errors import UsageError
from lamina.planner import machine as machine_module
from lamina.planner.machine import MARKS, VALUES, CollectivePoint, Machine, MatrixPoint, load_machine, shipped_names


@pytest.mark.parametrize("name", ["a100-40", "a100-80", "h100", "h200"])
def test_shipped_files_are_complete_and_every_value_says_where_it_comes_from(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name and machine.gpus_per_node == 8 and machine.network_bytes_per_s > 0
    assert set(machine.marks) == set(VALUES)
    for mark in machine.marks.values():
        assert mark.mark in MARKS and len(mark.source) > 10
    assert machine.memory_bytes > 40e9 and 1e12 < machine.memory_bytes_per_s < machine.matrix_flops_per_s


def test_newer_machines_are_faster() -> None:
    a40, a80, h100, h200 = map(load_machine, ("a100-40", "a100-80", "h100", "h200"))
    assert a40.matrix_flops_per_s == a80.matrix_flops_per_s < h100.matrix_flops_per_s
    rates = [m.memory_bytes_per_s for m in (a40, a80, h100, h200)]
    assert rates == sorted(rates) and len(set(rates)) == 4


def test_text_and_data_are_the_same_thing() -> None:
    points = (MatrixPoint(8, 16, 32, 0.125), MatrixPoint(8, 8, 8, 0.5, 4))
    links = (CollectivePoint("all_gather", 2, 1 << 20, 0.25),)
    machine = dataclasses.replace(load_machine("h100"), name='a "name"', matrix_points=points, collective_points=links)
    assert Machine.parse(machine.text()) == machine


def test_a_file_older_than_a_value_is_read() -> None:
    lines = load_machine("h200").text().splitlines(keepends=True)
    old = Machine.parse("".join(line for line in lines if not line.startswith("kernel_us")))
    assert old.kernel_us == 1.0 and old.marks["kernel_us"].mark == "assumed"


def test_a_path_and_here_are_machines_too(tmp_path, monkeypatch) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(load_machine("h200").text())
    assert load_machine(path) == load_machine(str(path)) == load_machine("h200")
    monkeypatch.setattr(machine_module, "OWN", tmp_path / "none.toml")
    with pytest.raises(UsageError, match="lamina doctor"):
        load_machine("here")
    monkeypatch.setattr(machine_module, "OWN", path)
    assert load_machine("here").device == "NVIDIA H200"


@pytest.mark.parametrize(
    "word, nearest", [("H10", "h100"), ("b200", "h200"), ("a100_80gb", "a100-80"), ("A100", "a100")]
)
def test_an_unknown_machine_names_the_nearest(word: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"nearest is '{nearest}"):
        load_machine(word)


def test_nothing_near_lists_what_there_is() -> None:
    with pytest.raises(UsageError) as caught:
        load_machine("/no/such/file.toml")
    assert all(name in str(caught.value) for name in shipped_names())


GOOD = load_machine("h100").text()


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("[values]", "[values", "not TOML"),
        ("[values]", "[other]", "no \\[values\\]"),
        ("gpus_per_node = 8", "gpus_per_node = 0", "at least 1; got 0"),
        ("launch_us =", "lunch_us =", "did you mean launch_us"),
        ('launch_us = { value = 10.0, mark = "assumed"', 'launch_us = { value = 10.0, mark = "guess"', "got 'guess'"),
        ("launch_us = { value = 10.0", "launch_us = { value = -10.0", "must be positive"),
        ("launch_us = { value = 10.0", "launch_us = { valve = 6.0", "launch_us is missing"),
        ("launch_us = { value = 10.0", "launch_us = { value = true", "launch_us is missing"),
        *(
            ("launch_us = { value = 10.0", f"launch_us = {{ value = {v}", "must be positive")
            for v in ("nan", "inf", "1e99")
        ),
        ('name = "h100"', "name = 100", "name is a word in quotes; got 100"),
        ("name =", "matrix_points = 3\nname =", "each begun by"),
    ],
)
def test_mistakes_in_a_file_are_named(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError, match=words):
        Machine.parse(GOOD.replace(old, new), "mine.toml")


@pytest.mark.parametrize(
    "row, words",
    [
        ("m = 1", "matrix_points is wrong"),
        ("m = 0\nn = 1\nk = 1\nms = 1.0", "m = 0, wanted a whole number above 0"),
        ("m = 1\nn = 1\nk = 1\nms = 0.0", "ms = 0.0, wanted a positive number"),
        ("m = 1\nn = 1\nk = 1\nms = -1.0", "ms = -1.0, wanted"),
        ('m = "a"\nn = 1\nk = 1\nms = 1.0', "m = 'a', wanted"),
        ("m = 1.5\nn = 1\nk = 1\nms = 1.0", "m = 1.5, wanted"),
    ],
)
def test_a_wrong_point_is_named(row: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Machine.parse(f"{GOOD}\n[[matrix_points]]\n{row}\n")


def test_a_file_that_is_no_text_is_named(tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"machine file .*mine.toml cannot be read: .*lamina doctor"):
        load_machine(path)


def test_nodes() -> None:
    machine = load_machine("h100")
    assert [machine.nodes(ranks) for ranks in (1, 8, 9, 512)] == [1, 1, 2, 64]
