"""The launcher's variables: the one place that reads them."""

from __future__ import annotations

import fcntl
import functools
import ipaddress
import os
import socket
import struct
import sys

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lamina.core.groups import naming_the_network
from lamina.core.start_up import meet, store_of_ranks
from lamina.core.watch_board import is_held_by_launcher
from lamina.errors import TransportError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
TASKS = {  # how many tasks starters have started that are no launchers of torch's, and which one this is
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    "mpirun": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpiexec": ("PMI_SIZE", "PMI_RANK"),
}
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def initialise_distributed() -> None:
    """Start the default process group from torchrun's variables, if there are any and nobody did it before."""
    choose_interface()
    if dist.is_initialized() or _trains_alone():
        return
    if torch.cuda.is_available():
        device = local_cuda_device()
        torch.cuda.set_device(device)
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    with naming_the_network():
        store, rank, world = next(rendezvous("env://")) if is_held_by_launcher() else store_of_ranks()
        store = meet(store, rank, world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def _trains_alone() -> bool:
    """Whether no launcher has told this process of others.

    Raises:
        TransportError: it was told that there are others, and not how to find them: each would train by itself.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if not missing:
        return False
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise TransportError(
            f"{' and '.join(missing)} not set, beside WORLD_SIZE={os.environ['WORLD_SIZE']}: start the ranks by "
            "torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each of them. To train in this process "
            "alone, type `unset WORLD_SIZE`"
        )
    _say_who_trains_alone()
    return True


@functools.cache
def _say_who_trains_alone() -> None:
    """`srun python train.py` trains as many models as there are tasks, which may be meant."""
    for starter, (count, number) in TASKS.items():
        tasks = os.environ.get(count, "1")
        if tasks != "1" and os.environ.get(number, "0") == "0":
            print(
                f"lamina: {starter} has started {tasks} tasks, and RANK, WORLD_SIZE and MASTER_ADDR are not set: "
                "each of them trains by itself. To train one model, let it start torchrun, once on each node",
                file=sys.stderr,
                flush=True,
            )


def choose_interface() -> None:
    """Tell Gloo which network joins the nodes, where it would take the loopback device.

    Gloo binds to an address of the host's name. On many clusters it has none, or 127.0.1.1, and ranks of two nodes
    never meet. The network over which this host reaches the launcher's address is one that all share.
    """
    world, local = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    master = os.environ.get("MASTER_ADDR")
    if world == local or master is None or GLOO_INTERFACE in os.environ:
        return
    if all(map(_is_loopback, _addresses_of(socket.gethostname()))):
        name = _interface_towards(master)
        if name is not None:
            os.environ[GLOO_INTERFACE] = name


def _addresses_of(host: str) -> list[str]:
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        return []


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _interface_towards(host: str) -> str | None:
    """The interface of the IPv4 address from which this host would speak to another; None: it would not leave it."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            own = probe.getsockname()[0]
            names = [name for _, name in socket.if_nameindex()]
            return None if _is_loopback(own) else next((n for n in names if _address_of(probe, n) == own), None)
    except OSError:
        return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    try:
        found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(found[20:24])


def local_cuda_device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


def local_ranks() -> int:
    """How many ranks share this host's cores; without a launcher's word for it, all of them."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
