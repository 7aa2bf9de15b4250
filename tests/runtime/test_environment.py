"""Which network Gloo is told to use, and what is said where ranks do not reach each other."""

from __future__ import annotations

import os
import socket

import pytest

from lamina.core.groups import naming_the_network
from lamina.errors import TransportError
from lamina.runtime import environment

TWO_NODES = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
LINK = "link0"


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
    with pytest.raises(RuntimeError, match="^of another kind$"), naming_the_network():
        raise RuntimeError("of another kind")
