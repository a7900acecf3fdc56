"""The memory of a group: a request and the forks that begin when its prefill ends.

Owns how many slots and blocks a group takes, and who of it holds which. Does not own the books
(`block_manager`, `state_slots`) or when a group runs (`scheduler`). No torch.

    memory = GroupMemory(blocks, slots)
    if memory.has_room(request, shared=[], spare=1):
        memory.give(request, shared=[])

All slots of a group, and each fork's own copy of a partly filled last block, are given out at once:
so a prefill that has begun can always fork.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.runtime.block_manager import BlockManager
from minivllm.runtime.request import Request
from minivllm.runtime.state_slots import StateSlots
from minivllm.runtime.step import BlockCopy, Copy, StateCopy


class GroupMemory:
    """Gives groups their memory and takes it back."""

    def __init__(self, blocks: BlockManager, slots: StateSlots) -> None:
        self.blocks = blocks
        self.slots = slots

    def num_blocks(self, tokens: int, n: int) -> int:
        """Blocks of all these tokens, and of the `n - 1` copies of a partly filled last one."""
        partial = tokens % self.blocks.block_size != 0
        return -(-tokens // self.blocks.block_size) + (n - 1) * partial

    def has_room(self, request: Request, shared: Sequence[int], spare: int) -> bool:
        """Whether the group's slots and blocks are free.

        Args:
            shared: blocks of its prefix that are cached.
            spare: blocks that must be left over.
        """
        n = 1 + len(request.forks)
        new = self.num_blocks(len(request.token_ids), n) - len(shared)
        # a cached block that nobody owns is free now, and is not once it is shared
        needed = new + self.blocks.num_unowned(shared) + spare
        return n <= self.slots.num_free and needed <= self.blocks.num_free

    def give(self, request: Request, shared: Sequence[int]) -> None:
        """Slots and blocks for a group that there is room for."""
        tokens = len(request.token_ids)
        self.blocks.share(shared)  # before anything is allocated, which could evict them
        new = self.blocks.allocate(self.num_blocks(tokens, 1) - len(shared))
        request.blocks = [*shared, *new]
        request.state_slot = self.slots.allocate()
        for fork in request.forks:
            fork.state_slot = self.slots.allocate()
            if tokens % self.blocks.block_size:
                fork.blocks = self.blocks.allocate(1)

    def take_back(self, request: Request) -> None:
        """All that one member holds, if it holds anything."""
        self.blocks.free(request.blocks)
        request.blocks = []
        if request.state_slot:
            self.slots.free(request.state_slot)
            request.state_slot = 0

    def plan_forks(self, request: Request) -> list[Copy]:
        """The copies that give each fork the state, and the last block if it is partly filled."""
        copies: list[Copy] = []
        for fork in request.forks:
            copies.append(StateCopy(("slot", request.state_slot), ("slot", fork.state_slot)))
            if fork.blocks:
                copies.append(BlockCopy(request.blocks[-1], fork.blocks[0]))
        return copies

    def share_prompt(self, request: Request, fork: Request) -> None:
        """Once those copies ran: the full blocks are the fork's too."""
        full = request.blocks[: request.num_computed_tokens // self.blocks.block_size]
        self.blocks.share(full)
        fork.blocks = full + fork.blocks

    def hand_over(self, request: Request, heir: Request) -> None:
        """A fork that has not begun gives back what was meant for it, and takes its head's."""
        self.take_back(heir)
        heir.state_slot, request.state_slot = request.state_slot, 0
        heir.blocks, request.blocks = request.blocks, []
