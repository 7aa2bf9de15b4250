"""Two nodes on one machine: network namespaces that only a slow link joins. Linux, root.

Each namespace has its own addresses, and nothing of the other's but the link: a TUN device at either end, and a thread
a direction that hands packets on when they are due. Kernels without `netem` do too.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import struct
import subprocess
import threading
import time
from types import TracebackType

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 1, 0x1000
DEVICE = "link0"
MTU_BYTES = 60_000
ADDRESSES = ("10.77.0.1", "10.77.0.2")


class Link:
    """Namespaces `names[0]` and `names[1]`, whose ends have `ADDRESSES`."""

    def __init__(self, delay_s: float, bytes_per_s: float) -> None:
        self.delay_s, self.bytes_per_s = delay_s, bytes_per_s
        self.names = [f"lamina-{end}-{os.getpid()}" for end in "ab"]
        self.bytes_sent = [0, 0]  # by the end that sends
        self._devices: list[int] = []

    def __enter__(self) -> Link:
        try:
            for name in self.names:
                _ip("netns", "add", name)
                self._devices.append(_open_device(name))
            for number, name in enumerate(self.names):
                _ip("-n", name, "addr", "add", ADDRESSES[number], "peer", ADDRESSES[1 - number], "dev", DEVICE)
                _ip("-n", name, "link", "set", DEVICE, "mtu", str(MTU_BYTES), "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        for sender in (0, 1):
            packets: queue.Queue[tuple[float, bytes]] = queue.Queue()
            threading.Thread(target=self._take, args=(sender, packets), daemon=True).start()
            threading.Thread(target=self._hand_on, args=(sender, packets), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def _take(self, sender: int, packets: queue.Queue[tuple[float, bytes]]) -> None:
        sent_at = 0.0  # when the last packet had left
        while True:
            try:
                packet = os.read(self._devices[sender], MTU_BYTES + 100)
            except OSError:  # the namespace is gone
                return
            sent_at = max(sent_at, time.monotonic()) + len(packet) / self.bytes_per_s
            self.bytes_sent[sender] += len(packet)
            packets.put((sent_at + self.delay_s, packet))

    def _hand_on(self, sender: int, packets: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, packet = packets.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                os.write(self._devices[1 - sender], packet)
            except OSError:
                return


def inside(name: str, host_name: str, command: list[str]) -> list[str]:
    """The command line that runs `command` in a namespace, on a host that calls itself `host_name`."""
    return ["ip", "netns", "exec", name, *with_host_name(host_name), *command]


def with_host_name(host_name: str) -> list[str]:
    """What stands before a command line whose host calls itself `host_name`."""
    return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host_name]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _open_device(namespace: str) -> int:
    """The TUN device of a namespace. Only the calling thread goes there, and comes back."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as here, open(f"/run/netns/{namespace}") as there:
        for place, within in ((there, True), (here, False)):
            if libc.setns(place.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns to {namespace}: run as root")
            if within:
                device = os.open("/dev/net/tun", os.O_RDWR)
                fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22s", DEVICE.encode(), IFF_TUN | IFF_NO_PI, b""))
    return device
