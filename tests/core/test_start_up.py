"""Ranks that meet before there is a process group."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lamina.core import start_up
from lamina.core.roll_call import RollCall
from lamina.errors import Disagreement, TransportError


def test_who_waits_says_for_whom_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start_up, "NOTICES_S", (0.2, 60.0))
    monkeypatch.setattr(start_up, "FIRST_LOOK_S", 0.1)
    store, said = dist.HashStore(), ""
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(start_up.meet, store, 1, 4)]
        while not dist.PrefixStore("lamina/start", store).check(["token 1"]):
            time.sleep(0.01)
        waiting += [pool.submit(start_up.meet, store, rank, 4) for rank in (2, 3)]
        while not said:
            time.sleep(0.01)
            said = capfd.readouterr().err
        start_up.meet(store, 0, 4)
        for one in waiting:
            one.result(timeout=10)
    assert re.match(r"lamina: rank 1 has waited \d+ s for .*rank.* 0.* to call lamina.shard\(\)", said)
    assert not capfd.readouterr().err


def test_a_rank_that_will_not_come_is_named_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "FIRST_LOOK_S", 0.1)
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(start_up.meet, store, rank, 4) for rank in (0, 3)]
        for rank in (1, 2):
            start_up.say_returned(store, rank)
        for one in waiting:
            with pytest.raises(Disagreement, match="ranks 1-2 ended without a call"):
                one.result(timeout=10)


def meet_all(store: dist.Store, order: Sequence[int]) -> list[dist.Store]:
    """Ranks come in this order, each when the one before it waits; where they meet next."""
    with ThreadPoolExecutor(len(order)) as pool:
        waiting = []
        for rank in order:
            waiting.append(pool.submit(start_up.meet, store, rank, len(order)))
            time.sleep(0.05)
        return [one.result(timeout=10) for one in waiting]


def test_ranks_that_are_started_anew_meet_each_other_only() -> None:
    store = dist.HashStore()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1), (0, 1), (1, 0), (3, 0, 2, 1), (0,), (2, 0, 1)):
        places = meet_all(store, order)
        assert not places[0].check(["address"])  # of those before them
        places[0].set("address", "")
        assert all(place.check(["address"]) for place in places)


def test_a_rank_that_died_before_all_had_come_is_not_taken_for_its_successor() -> None:
    store = dist.HashStore()
    died = RollCall(store, 1, 3)
    assert not died.is_complete() and died.missing() == [0, 2]
    first, third = RollCall(store, 0, 3), RollCall(store, 2, 3)
    assert not first.is_complete() and not third.is_complete() and not first.is_complete()
    assert first.missing() == [1]
    second = RollCall(store, 1, 3)
    assert not second.is_complete() and second.missing() == [0]  # it is not in the list
    for call in (first, third, second):
        assert not call.is_complete()
    assert first.is_complete() and third.is_complete() and second.is_complete()
    assert first.name == second.name == third.name


def test_who_waits_for_rank_0s_port_says_so(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start_up, "NOTICES_S", (0.2, 60.0))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        port, said = held.getsockname()[1], ""
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(start_up._connected, dist.HashStore, "127.0.0.1", port, 3)
            while not said:
                time.sleep(0.01)
                said = capfd.readouterr().err
            held.listen()
            waiting.result(timeout=10)
    assert f"rank 3 has waited 0 s for rank 0 to open port {port} of 127.0.0.1" in said
    assert not capfd.readouterr().err


def test_a_port_that_stays_shut_is_an_error_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=0.3))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(TransportError, match="rank 1 has waited .* for rank 0 to open port"):
            start_up._connected(dist.HashStore, "127.0.0.1", held.getsockname()[1], 1)


@pytest.fixture
def held_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Another program's, which takes connections and says nothing."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(held.getsockname()[1]))
        monkeypatch.setenv("WORLD_SIZE", "2")
        yield held


def test_rank_0_whose_port_is_taken_says_so(held_port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(TransportError, match=f"cannot open port {held_port.getsockname()[1]} .*another program"):
        start_up.store_of_ranks()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("no-such-host.invalid", "rank 0 has waited .* for an address of no-such-host.invalid"),
        ("192.0.2.1", "rank 0 has waited .* for an answer from itself at port .*is that an address of this host"),
    ],
)
def test_rank_0_that_is_not_at_the_masters_address_says_so(
    host: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": "29500"}
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=0.6))
    monkeypatch.setattr(dist, "TCPStore", lambda *given, **named: time.sleep(1.0))  # as it is while nobody answers
    with pytest.raises(TransportError, match=words):
        start_up.store_of_ranks()


def test_ranks_that_meet_another_program_say_so_and_give_up(
    held_port: socket.socket, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(start_up, "NOTICES_S", (0.2,))
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=0.6))
    with pytest.raises(TransportError, match="rank 1 has waited .* for an answer from port .*another program"):
        start_up.store_of_ranks()
    assert "rank 1 has waited 0 s for an answer from port" in capfd.readouterr().err


def test_what_answers_and_is_no_store_is_named(held_port: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=5))

    def answer() -> None:
        for _ in range(2):  # whether somebody listens; the store's client
            with held_port.accept()[0] as line:
                line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with ThreadPoolExecutor(1) as pool:
        pool.submit(answer)
        with pytest.raises(TransportError, match="MASTER_PORT"):
            start_up.store_of_ranks()


def test_ranks_that_do_not_come_are_named_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_up, "FIRST_LOOK_S", 0.1)
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", timedelta(seconds=0.3))
    with pytest.raises(Disagreement, match="rank 1 has waited .* for ranks 0, 2 to call lamina.shard"):
        start_up.meet(dist.HashStore(), 1, 3)


def test_variables_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(TransportError, match="MASTER_PORT not set"):
        start_up.store_of_ranks()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("MASTER_PORT", "abc", "whole numbers: .*'abc'"),
        ("MASTER_PORT", "", "whole numbers"),
        ("MASTER_PORT", "70000", "from 1 to 65535"),
        ("WORLD_SIZE", "two", "whole numbers: .*'two'"),
        ("RANK", "2", "RANK=2 and WORLD_SIZE=2"),
        ("RANK", "-1", "RANK=-1"),
    ],
)
def test_variables_that_make_no_sense_are_named(
    name: str, text: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", name: text}
    for variable, value in values.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(TransportError, match=told):
        start_up.store_of_ranks()
