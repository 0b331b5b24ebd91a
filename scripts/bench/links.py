"""Processes of several ranks, one a GPU, and the exchange blocks that they show one another.

A block is the storage of a tensor of its own, shared by CUDA IPC. Its kernels may write the other ranks'
blocks, so every pair of GPUs needs peer access, which torch's first copy between them turns on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing.spawn as processes
from torch import Tensor

MOST = 8


@dataclass
class Link:
    """One rank of `world`: its groups, and a process' view of all blocks."""

    rank: int
    world: int
    cpu: Any = field(init=False)

    def __post_init__(self) -> None:
        torch.cuda.set_device(self.rank)
        dist.init_process_group(
            "nccl", rank=self.rank, world_size=self.world, device_id=torch.device("cuda", self.rank)
        )
        self.cpu = dist.new_group(backend="gloo")

    def barrier(self) -> None:
        """All ranks' devices have done what was asked of them."""
        torch.cuda.synchronize()
        dist.barrier(self.cpu)

    def all(self, value: object) -> list[Any]:
        """Every rank's `value`, in rank order."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self.cpu)
        return found

    def blocks(self, words: int) -> list[Tensor]:
        """Zeroed exchange blocks [words] i64 of all ranks, as this one can address them."""
        own = torch.zeros(words, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        handles = self.all(own.untyped_storage()._share_cuda_())
        blocks = []
        for rank, handle in enumerate(handles):
            if rank == self.rank:
                blocks.append(own)
                continue
            storage = torch.UntypedStorage._new_shared_cuda(*handle)
            there = torch.empty(0, dtype=torch.int64, device=f"cuda:{rank}")
            there.set_(storage, 0, (words,), (1,))
            there[:1].copy_(own[:1])  # peer access
            blocks.append(there)
        self.barrier()
        own.zero_()
        self.barrier()
        return blocks

    def exchange(self, words: int) -> tuple[Tensor, ...]:
        """peers, exchange, step_counter, rank of this rank, over blocks that live as long."""
        blocks = self.blocks(words)
        peers = torch.zeros(MOST, dtype=torch.int64)
        for other, block in enumerate(blocks):
            peers[other] = block.data_ptr()
        self._kept = blocks
        counter = torch.zeros(4, dtype=torch.int64)
        number = torch.tensor([self.rank, 0, 0, 0], dtype=torch.int32)
        return peers.cuda(), blocks[self.rank], counter.cuda(), number.cuda()


def start(world: int, work: Callable[..., None], *arguments: Any) -> None:
    """Run work(Link, *arguments) in `world` processes; an error of one is raised."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free.getsockname()[1]),
            "GLOO_SOCKET_IFNAME": "lo",
        }
    processes.spawn(_run, (world, work, arguments), world)


def _run(rank: int, world: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    link = Link(rank, world)
    try:
        work(link, *arguments)
        link.barrier()
    finally:
        dist.destroy_process_group()
