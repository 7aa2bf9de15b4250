"""The rank's half of the test harness: serve calls over a pipe until the test session ends.

Kept apart from harness.py so that a rank imports no more than it needs, and because the fork server looks the entry
function up by module name.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1


class Call(NamedTuple):
    payload: bytes  # pickle of (fn, args, kwargs)
    modules: dict[str, str]  # module name -> source file, to be imported before the payload is read
    debug: bool


class Answer(NamedTuple):
    payload: bytes | None  # pickle of what fn returned
    error: tuple[str, str, str] | None  # type name, message, traceback


class Settled(NamedTuple):
    in_step: bool  # the default group still works, all ranks are at the same call and can make the same groups
    groups: int  # process groups alive in this rank
    calm: bool  # no model is alive on any rank


class Streams:
    """Standard output and error of whoever sends this, for a process that it has forked: they become its own."""

    def __reduce__(self) -> Any:
        return _take_streams, (DupFd(1), DupFd(2))


def _take_streams(*copies: Any) -> None:
    for descriptor, copy in enumerate(copies, start=1):
        mine = copy.detach()
        os.dup2(mine, descriptor)
        os.close(mine)


def serve(rank: int, world: int, store_port: int, pipe: Connection, stack_file: Path, streams: None) -> None:
    """Entry point of a rank process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if sys.platform == "linux":  # a rank that is stopped has no thread that could see to it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the test session, which ends the ranks
    _let_threads_finish()
    stack = stack_file.open("w")  # must outlive this function's locals: faulthandler keeps only its descriptor
    faulthandler.register(signal.SIGUSR1, file=stack)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _seed_no_missing_devices()
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    global _threads
    deadline = time.monotonic() + 10.0
    while (_threads := _threads_of_groups()) < THREADS_OF_A_GROUP and time.monotonic() < deadline:
        time.sleep(1e-3)  # a thread has its name once it has run
    gc.collect()
    gc.freeze()  # torch's own objects need not be looked at after every call
    pipe.send_bytes(pickle.dumps(_settle(0)))
    calls = 0
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        if message is None:
            reply: Answer | Settled = _settle(calls)
        else:
            calls += 1
            reply = _answer(message)
            gc.collect()  # the next call finds nothing of this one
        pipe.send_bytes(pickle.dumps(reply))


def serve_once(call: Call, pipe: Connection, streams: None) -> None:
    """Entry point of a process that answers one call and is no rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _seed_no_missing_devices()
    pipe.send_bytes(pickle.dumps(_answer(call)))


def _let_threads_finish() -> None:
    """A thread that wakes waits for its turn: from here on, and in all threads that are started from here.

    Gloo's thread that receives only tries the lock that its thread that sends holds, and asks again at once. If it has
    interrupted the sender, it asks until its slice of time is over: on two busy cores, a third to a half of what all
    collectives cost.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a sandbox that does not allow it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _seed_no_missing_devices() -> None:
    """`torch.manual_seed` remembers itself and its stack for devices that may come: 7 ms for each seed, without any."""
    import torch

    kinds: tuple[Any, ...] = (torch.cuda, torch.mtia, torch.xpu)
    for kind in kinds:
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


def _answer(call: Call) -> Answer:
    try:
        _reset()
        for name, file in call.modules.items():
            _import(name, file)
        _apply_debug(call.debug)
        fn, args, kwargs = pickle.loads(call.payload)
        answer = Answer(pickle.dumps(fn(*args, **kwargs)), None)
    except BaseException as error:  # SystemExit and pytest's outcomes too: the test must hear of them
        answer = Answer(None, (type(error).__name__, str(error), traceback.format_exc()))
        error.__traceback__ = None  # frees the frames, and with them the tensors that they hold
    _reset()
    return answer


_modules = 0  # how many were imported when `_set_aside` last acted
# Torch's own. One of Gloo's looks after the connections; it stays with the last work of a group, which is no garbage.
THREAD_NAME, THREADS_OF_A_GROUP = "gloo_runloop", 2
_threads = 0  # of torch's, in one group


def _set_aside() -> None:
    """What imports have left need not be looked through after every call: a fifth of a second each, late in a session.

    Nothing is set aside while a group is alive that torch has forgotten: if whatever keeps it becomes garbage, nobody
    would notice, and the other ranks' ends of that group would wait for this one.
    """
    import torch.distributed as dist

    global _modules
    if len(sys.modules) > _modules and _has_threads_of_groups(_threads * len(dist.distributed_c10d._world.pg_map)):
        _modules = len(sys.modules)
        gc.freeze()


def _has_threads_of_groups(count: int) -> bool:
    """A thread that has ended, and has been waited for, is to be seen a moment longer, on a busy machine."""
    deadline = time.monotonic() + 0.5
    while (found := _threads_of_groups()) > count and time.monotonic() < deadline:
        time.sleep(5e-3)
    return found == count


def _threads_of_groups() -> int:
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # one that has ended
            count += THREAD_NAME in (task / "comm").read_text()
    return count


def _settle(calls: int) -> Settled:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return Settled(False, 0, False)
    lives, stay, groups = _a_model_is_alive(), _groups_stay(), len(dist.distributed_c10d._world.pg_names)
    mine = torch.tensor([calls, -calls, int(lives), int(stay), groups, -groups], dtype=torch.int64)
    try:
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    except RuntimeError:
        return Settled(False, 0, False)
    in_step = mine[:2].tolist() == [calls, -calls] and (not mine[3] or mine[4:].tolist() == [groups, -groups])
    calm = in_step and not mine[2]
    are_over = calm and not mine[3]
    if are_over:
        _end_groups()
    if are_over or (stay and not lives):
        _set_aside()
    return Settled(in_step, len(dist.distributed_c10d._world.pg_map), bool(calm))


def _groups_stay() -> bool:
    """torch has named a group by its ranks and by how many groups there were: it counts them."""
    import torch.distributed as dist

    return not all(name.isdigit() for name in dist.distributed_c10d._world.pg_names.values())


def _a_model_is_alive() -> bool:
    assemble = sys.modules.get("lamina.runtime.assemble")
    return assemble is not None and len(assemble.RUNTIMES) > 0


def _end_groups() -> None:
    """End the groups of models that are gone on all ranks: each has a thread that wakes a hundred times a second.

    It hears of its end when it wakes, and whoever ends the group waits for it: they are ended side by side.
    """
    boxes = _forget_groups()
    with ThreadPoolExecutor(len(boxes) or 1) as pool:
        list(pool.map(list.clear, boxes))


def _forget_groups() -> list[list[Any]]:
    """All groups but the world's, known to nobody any more, each in a box of its own."""
    import torch.distributed as dist

    boxes = [[group] for group in list(dist.distributed_c10d._world.pg_names) if group is not dist.group.WORLD]
    for (group,) in boxes:
        dist.destroy_process_group(group)
    group_sets = sys.modules.get("lamina.core.group_sets")
    if group_sets is not None:
        group_sets.free_sets(())  # which forgets the ended ones that it keeps for a next model
    return boxes


def _reset() -> None:
    """The state in which every call starts."""
    import numpy
    import torch

    lamina = sys.modules.get("lamina")
    if lamina is not None:
        lamina.debug(False)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():  # asked first: setting it imports the compiler, two seconds a rank
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


def _apply_debug(debug: bool) -> None:
    if debug:
        import lamina

        switch: Any = getattr(lamina, "debug", None)
        if callable(switch):
            switch(True)


def _import(name: str, file: str) -> ModuleType:
    """The module of that name if it comes from that file, else the file under that name."""
    try:
        module = importlib.import_module(name)
        if getattr(module, "__file__", None) == file:
            return module
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise  # the module was found, but something that it imports is missing
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    _make_parents(name, Path(file))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _make_parents(name: str, file: Path) -> None:
    """`import a.b` wants `a` first: stand-ins for the folders above a test file that are no packages."""
    names = name.split(".")[:-1]
    for depth in range(1, len(names) + 1):
        parent = ".".join(names[:depth])
        try:
            importlib.import_module(parent)
        except ModuleNotFoundError:
            package = ModuleType(parent)
            package.__path__ = [str(file.parents[len(names) - depth])]
            sys.modules[parent] = package


def _end_with_parent() -> None:
    """A rank that waits in a collective would outlive a killed test session."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
