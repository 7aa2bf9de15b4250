"""Ends that torch would wait in for ever: what holds its groups is freed while it destroys them."""

from __future__ import annotations

from forked_ranks import launched

DESTROY = """
def work():
    import threading
    import time

    import torch
    import torch.distributed as dist

    import lamina
    from lamina.core.teardown import on_teardown

    model = lamina.shard(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    held, freed = threading.Lock(), []
    held.acquire()

    def free():
        freed.append(time.monotonic() - began)
        held.release()

    on_teardown(free)
    if {waits}:
        dist.distributed_c10d._unregister_all_process_groups = held.acquire  # in torch's, by a call in C, as NCCL's
    began = time.monotonic()
    dist.destroy_process_group()
    return freed, time.monotonic() - began
"""


def test_what_holds_groups_is_freed_once() -> None:
    outcome = launched(DESTROY.format(waits=True), 2)
    freed, all_s = outcome.result
    assert len(freed) == 1 and freed[0] <= all_s < 10.0, outcome


def test_a_teardown_that_returns_is_left_alone() -> None:
    outcome = launched(DESTROY.format(waits=False), 2)
    assert outcome.result[0] == [], outcome
