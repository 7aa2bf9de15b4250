"""Which network Gloo is told to use, and what is said where ranks do not reach each other."""

from __future__ import annotations

import os
import socket

import pytest
import torch

import lamina
from lamina.core.groups import naming_the_network
from lamina.errors import TransportError
from lamina.runtime import environment

OF_STARTERS = {name for names in environment.TASKS.values() for name in names}
TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
LINK = "link0"


@pytest.fixture
def own_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", *OF_STARTERS}:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "addresses", "wanted"),
    [
        (TWO_NODES, ["127.0.1.1"], LINK),
        (TWO_NODES, [], LINK),  # the host's name means nothing to it
        (TWO_NODES, ["::1", "127.0.0.1"], LINK),
        (TWO_NODES, ["127.0.1.1", "10.0.0.2"], None),  # Gloo finds it by itself
        (TWO_NODES | {"GLOO_SOCKET_IFNAME": "ib0"}, ["127.0.1.1"], "ib0"),
        (TWO_NODES | {"LOCAL_WORLD_SIZE": "4"}, ["127.0.1.1"], None),
        (TWO_NODES | {"MASTER_ADDR": "10.0.0.9"}, ["127.0.1.1"], None),  # unreachable
        ({"WORLD_SIZE": "4"}, ["127.0.1.1"], None),
        ({}, [], None),
    ],
)
def test_the_network_towards_the_launcher_is_chosen(
    variables: dict[str, str], addresses: list[str], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in {*TWO_NODES, environment.GLOO_INTERFACE}:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_addresses_of", lambda host: addresses)
    monkeypatch.setattr(environment, "_interface_towards", {"10.0.0.1": LINK}.get)
    environment.choose_interface()
    assert os.environ.get(environment.GLOO_INTERFACE) == wanted


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "MASTER_ADDR not set, beside WORLD_SIZE=2"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "node-a"}, "RANK not set, beside WORLD_SIZE=8"),
        ({"WORLD_SIZE": "4"}, "RANK and MASTER_ADDR not set"),
    ],
)
def test_a_rank_that_knows_of_others_does_not_train_alone(
    variables: dict[str, str], missing: str, own_variables: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        own_variables.setenv(name, value)
    with pytest.raises(TransportError, match=missing):
        lamina.shard(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, ""),
        ({"RANK": "3", "MASTER_ADDR": "node-a"}, ""),  # left over
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, "srun has started 8 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "5"}, ""),  # the first one says it
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, "mpirun has started 4 tasks"),
    ],
)
def test_tasks_that_train_alone_are_told_once(
    variables: dict[str, str], said: str, own_variables: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in variables.items():
        own_variables.setenv(name, value)
    environment._say_who_trains_alone.cache_clear()
    for _ in range(2):
        lamina.shard(torch.nn.Linear(2, 2))
    told = capfd.readouterr().err
    assert told.count("lamina: ") == bool(said) and said in told


def test_interfaces_are_found_by_their_address() -> None:
    assert environment._interface_towards("127.0.0.1") is None
    assert environment._interface_towards("a host that does not exist") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        assert environment._address_of(probe, "lo") == "127.0.0.1"
        assert environment._address_of(probe, "nothing0") is None


def test_ranks_that_do_not_meet_are_told_what_to_type() -> None:
    with pytest.raises(TransportError, match="export GLOO_SOCKET_IFNAME=.*refused"), naming_the_network():
        raise RuntimeError("Gloo connectFullMesh failed with: Connection refused")
    with pytest.raises(TransportError, match="--max-restarts.*DISABLE_SHARE_RDZV_TCP_STORE=1"), naming_the_network():
        raise RuntimeError("Gloo connectFullMesh failed with: Connection refused")
    with pytest.raises(TransportError, match="ulimit -n.*files"), naming_the_network():
        raise RuntimeError("socket: Too many open files")
    with pytest.raises(TransportError, match="GLOO_SOCKET_IFNAME.*ip -brief"), naming_the_network():
        raise RuntimeError("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth7")
    with pytest.raises(TransportError, match="thread.*ulimit -u"), naming_the_network():
        raise RuntimeError("Resource temporarily unavailable")
    with pytest.raises(RuntimeError, match="^of another kind$"), naming_the_network():
        raise RuntimeError("of another kind")
