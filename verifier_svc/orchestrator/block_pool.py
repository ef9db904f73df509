"""KV blocks: who holds which, and which full ones can be shared by a later prompt.

Block 0 is the dummy block of warm-up and padding; the pool never hands it out.

Prefix cache: a full block is filed under (uid of the block before it, its own token ids). A dict finds the key by its
hash and then compares it whole, so token ids are re-checked on every hit and a hash collision cannot mix up two
prompts. The uid is new each time a block is filed: what followed an evicted block can never be reached through
another block that took its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ROOT_UID = 0
"""Stands before the first block of every prompt."""

_Key = tuple[int, tuple[int, ...]]


class BlockPool:
    """Reference-counted blocks 1 .. num_blocks - 1 with a prefix cache over the full ones.

    Args:
        num_blocks: blocks of the KV cache, the dummy block included.
        block_size: tokens a block.
        enable_prefix_caching: False: nothing is filed and every look-up misses.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = enable_prefix_caching
        self._ref_count = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))  # never filed, or filed no more
        self._evictable: OrderedDict[int, None] = OrderedDict()  # filed, held by nobody, oldest first
        self._block_of_key: dict[_Key, int] = {}
        self._key_of_block: dict[int, _Key] = {}
        self._uid_of_block: dict[int, int] = {}
        self._last_uid = ROOT_UID

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has seen that `num_free` allows it."""
        blocks: list[int] = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._ref_count[block] = 1
            blocks.append(block)
        return blocks

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back one reference of each. The last blocks of a prompt are evicted before its first ones."""
        for block in reversed(block_ids):
            count = self._ref_count[block] - 1
            if count < 0:
                raise AssertionError(f"block {block} was freed twice")
            self._ref_count[block] = count
            if count == 0:
                if block in self._key_of_block:
                    self._evictable[block] = None
                else:
                    self._free.append(block)

    def lookup(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Longest cached prefix of `tokens` in whole blocks, always short of the last token, which has to be computed.

        Returns:
            The blocks, with a reference taken on each, and the uid of the last one (ROOT_UID without a hit).
        """
        blocks: list[int] = []
        uid = ROOT_UID
        size = self.block_size
        for start in range(0, len(tokens) - size, size):
            block = self._block_of_key.get((uid, tuple(tokens[start : start + size])))
            if block is None:
                break
            if self._ref_count[block] == 0:
                del self._evictable[block]
            self._ref_count[block] += 1
            blocks.append(block)
            uid = self._uid_of_block[block]
        return blocks, uid

    def register(self, block: int, parent_uid: int, tokens: tuple[int, ...]) -> int:
        """File a full block whose KV is valid, or will be before any later step reads it.

        Returns:
            The uid to file the next block under: of this block, or of the one that holds the same tokens already.
        """
        if not self._caching:
            return ROOT_UID
        key = (parent_uid, tokens)
        known = self._block_of_key.get(key)
        if known is not None:
            return self._uid_of_block[known]
        self._last_uid += 1
        self._block_of_key[key] = block
        self._key_of_block[block] = key
        self._uid_of_block[block] = self._last_uid
        return self._last_uid

    def reset_cache(self) -> None:
        """Forget every filed block; those in use stay with their holders."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._block_of_key.clear()
        self._key_of_block.clear()
        self._uid_of_block.clear()

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        del self._block_of_key[self._key_of_block.pop(block)]
        del self._uid_of_block[block]
        return block
