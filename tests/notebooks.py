"""A Jupyter kernel for tests of notebooks: a fork, as forked_programs.py says, and so are the ranks it launches."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forked_programs import run_warm

if TYPE_CHECKING:
    from jupyter_client.blocking.client import BlockingKernelClient

SOURCE = str(Path(__file__).parents[1] / "src")
END_S = 20


class Kernel:
    """What its cells have shown and which errors they have ended with."""

    def __init__(self, client: BlockingKernelClient) -> None:
        self._client = client
        self.shown: list[str] = []
        self.failures: list[str] = []

    def run(self, cell: str) -> None:
        self._client.execute_interactive(cell, output_hook=self._take, timeout=120)

    def _take(self, message: dict) -> None:  # type: ignore[type-arg]
        if message["msg_type"] == "stream":
            self.shown.append(message["content"]["text"])
        elif message["msg_type"] == "error":
            self.failures.append(f"{message['content']['ename']}: {message['content']['evalue']}")


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    from jupyter_client.blocking.client import BlockingKernelClient
    from jupyter_client.connect import write_connection_file

    file, _ = write_connection_file(str(folder / "kernel.json"), transport="ipc", ip=str(folder / "kernel"))
    served = threading.Thread(target=run_warm, args=(_serve, file), daemon=True)
    served.start()
    client = BlockingKernelClient(connection_file=file)
    client.load_connection_file()
    client.start_channels(hb=False)  # it must answer within a second, on a busy machine too
    try:
        client.wait_for_ready(timeout=60)
        yield Kernel(client)
    finally:
        # not client.shutdown(): ipykernel 7.4 ends the thread that hears of it while that still sends, which may hang
        client.execute("exit")
        served.join(END_S)
        client.stop_channels()
        assert not served.is_alive(), "the kernel has not ended"


def _serve(file: str) -> None:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["JPY_PARENT_PID"] = str(os.getpid())  # the kernel ends with this process
    subprocess.run([sys.executable, "-m", "ipykernel_launcher", "-f", file], env=environment, check=True)
