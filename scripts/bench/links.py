"""Processes of several ranks, one a GPU, and the exchange blocks that they show one another.

A block lies in torch's symmetric memory, whose rendezvous gives every process the addresses of all. An
engine's own ranks share theirs without torch (`runtime/`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from torch import Tensor
from torch.multiprocessing.spawn import spawn

MOST = 8


@dataclass
class Link:
    """One rank of `world`: its group of devices, and one over the CPU."""

    rank: int
    world: int
    group: dist.ProcessGroup = field(init=False)
    cpu: Any = field(init=False)

    def __post_init__(self) -> None:
        device = torch.device("cuda", self.rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", rank=self.rank, world_size=self.world, device_id=device)
        assert dist.group.WORLD is not None
        self.group, self.cpu = dist.group.WORLD, dist.new_group(backend="gloo")

    def barrier(self) -> None:
        """All ranks' devices have done what was asked of them."""
        torch.cuda.synchronize()
        dist.barrier(self.cpu)

    def all(self, value: object) -> list[Any]:
        """Every rank's `value`, in rank order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.cpu)
        return found

    def symmetric(self, *shape: int, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
        """Memory of this rank that the others can address, and where each one's is."""
        own = symm_mem.empty(*shape, dtype=dtype, device=torch.device("cuda", self.rank))
        addresses = list(symm_mem.rendezvous(own, self.group).buffer_ptrs)
        assert addresses[self.rank] == own.data_ptr()
        return own, addresses

    def exchange(self, words: int) -> tuple[Tensor, ...]:
        """peers, exchange, step_counter, rank of this rank, in a clean state."""
        block, addresses = self.symmetric(words, dtype=torch.int64)
        block.zero_()
        self.barrier()
        peers = torch.tensor([*addresses, *[0] * (MOST - self.world)])
        counter = torch.zeros(4, dtype=torch.int64)
        number = torch.tensor([self.rank, 0, 0, 0], dtype=torch.int32)
        return peers.cuda(), block, counter.cuda(), number.cuda()


def start(world: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(Link, *arguments) in `world` processes; an error of one is raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    spawn(_run, (world, work, arguments), world)


def _run(rank: int, world: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    link = Link(rank, world)
    try:
        work(link, *arguments)
        link.barrier()
    finally:
        dist.destroy_process_group()
