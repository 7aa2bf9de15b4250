"""The rank's half of `launch`: what runs in each new process.

The process starts with an empty `__main__`, into which ship.py puts what the function needs. It talks to the launcher
over one pipe: in comes `Ask`, out go `Started`, then `Returned` or `Failed`. A rank that failed waits to be ended, so
that its peers see no broken connection whose error would hide the cause; a rank whose launcher is gone ends itself.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import NamedTuple


class Ask(NamedTuple):
    payload: bytes  # of (fn, args), by ship.dumps
    argv: list[str]
    folder: str


class Started(NamedTuple):
    """All is imported, the function is about to be called."""


class Returned(NamedTuple):
    result: bytes | None  # pickled; rank 0 only


class Failed(NamedTuple):
    error: str  # "Type: message"
    traceback: str  # from the user's function on, without the message
    at: float  # time.time(), to find the rank that failed first


Report = Returned | Failed


def main(descriptor: int) -> None:
    """Entry point; `descriptor` is this end of the pipe."""
    # What torch's import made stays to the end: to look through it, above all at the end, takes half a second.
    gc.freeze()
    gc.enable()
    pipe = Connection(descriptor)
    ask: Ask = pickle.loads(pipe.recv_bytes())
    threading.Thread(target=_end_with_launcher, args=(pipe,), daemon=True).start()
    pipe.send_bytes(pickle.dumps(Started()))
    try:
        report: Report = Returned(_call(ask))
    except KeyboardInterrupt:
        os._exit(130)  # the launcher asked for it; Python's own exit would print a traceback
    except BaseException as error:
        _end_quietly(1)
        report = _failure(error)
    else:
        _end_quietly(130)  # another rank may fail while this one takes down what it has
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(pickle.dumps(report))
    if isinstance(report, Failed):
        while True:
            signal.pause()


def _end_quietly(code: int) -> None:
    """End at once when the launcher asks, which may be as soon as the report is read; there is nothing left to say."""
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))


def _call(ask: Ask) -> bytes | None:
    from . import ship

    sys.argv = ask.argv
    os.chdir(ask.folder)
    _take_device()
    fn, args = ship.loads(ask.payload)
    try:
        result = fn(*args)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
        result = None
    if os.environ["RANK"] != "0":
        packed = None
    else:
        try:
            packed = pickle.dumps(result)
        except Exception as problem:
            raise TypeError(
                f"the result of rank 0, a {type(result).__name__}, cannot be sent back: {problem}. Return plain values,"
                " or save what was made and return its path."
            ) from None
    _leave_group()
    return packed


def _take_device() -> None:
    import torch

    index = int(os.environ["LOCAL_RANK"])
    if index < torch.cuda.device_count():
        torch.cuda.set_device(index)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _failure(error: BaseException) -> Failed:
    from .core.terminal import add_notes, frames_text, words_of
    from .errors import LaminaError

    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next  # begin where the user's code begins
    add_notes(error)
    words = words_of(error)
    if isinstance(error, LaminaError):
        words += f" [{error.code}: see docs/errors.md]"
    return Failed(words, frames_text(traceback.extract_tb(frames), error).rstrip(), time.time())


def _end_with_launcher(pipe: Connection) -> None:
    """The launcher sends nothing more: what ends this wait is its death."""
    try:
        pipe.poll(None)
    except OSError:
        pass
    os.killpg(os.getpid(), signal.SIGKILL)
