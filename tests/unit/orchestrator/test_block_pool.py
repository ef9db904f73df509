"""Blocks: counted references, a prefix cache that cannot mix up prompts, and an order of eviction."""

from __future__ import annotations

import random

import pytest

from verifier_svc.orchestrator.block_pool import ROOT_UID, BlockPool

SIZE = 4


def make_pool(num_blocks: int = 9, caching: bool = True) -> BlockPool:
    return BlockPool(num_blocks, SIZE, caching)


def file(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Allocate and file all full blocks of a text, as a prefill does; the blocks stay held."""
    blocks, uid = pool.lookup([*tokens, 0])
    start = len(blocks)
    blocks += pool.allocate(len(tokens) // SIZE - start)
    for index in range(start, len(blocks)):
        uid = pool.register(blocks[index], uid, tuple(tokens[index * SIZE : (index + 1) * SIZE]))
    return blocks


def cached_len(pool: BlockPool, tokens: list[int]) -> int:
    """Tokens of `tokens` that a look-up finds; the references are given back."""
    blocks, _ = pool.lookup([*tokens, 0])
    pool.free(blocks)
    return len(blocks) * SIZE


def text(start: int, num_blocks: int) -> list[int]:
    return list(range(start, start + num_blocks * SIZE))


def test_every_block_but_the_dummy_block_is_handed_out_once() -> None:
    pool = make_pool()
    assert (pool.num_free, pool.usage) == (8, 0.0)
    blocks = pool.allocate(3) + pool.allocate(5)
    assert sorted(blocks) == list(range(1, 9))
    assert (pool.num_free, pool.usage) == (0, 1.0)
    pool.free(blocks)
    assert (pool.num_free, pool.usage) == (8, 0.0)


def test_more_than_there_are_is_no_silent_failure() -> None:
    with pytest.raises(KeyError):
        make_pool().allocate(9)


@pytest.mark.parametrize("filed", [False, True])
def test_a_block_freed_twice_is_an_error(filed: bool) -> None:
    pool = make_pool()
    blocks = file(pool, text(0, 1)) if filed else pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match=f"block {blocks[0]} was freed twice"):
        pool.free(blocks)
    assert pool.num_free == 8


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_num_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert make_pool().num_blocks_for(num_tokens) == num_blocks


def test_lookup_takes_a_reference_and_stops_short_of_the_last_token() -> None:
    pool = make_pool()
    blocks = file(pool, text(0, 2))
    assert pool.lookup(text(0, 2))[0] == blocks[:1], "the last token has to be computed"
    assert pool.lookup([*text(0, 2), 99])[0] == blocks
    pool.free(blocks)
    pool.free(blocks[:1])
    assert pool.num_free == 8 - 2
    pool.free(blocks)
    assert pool.num_free == 8


def test_lookup_finds_the_longest_prefix() -> None:
    pool = make_pool()
    pool.free(file(pool, text(0, 3)))
    assert cached_len(pool, text(0, 3)) == 12
    assert cached_len(pool, [*text(0, 2), 7, 7, 7, 7]) == 8
    assert cached_len(pool, [*text(0, 1), 9, *text(5, 2)]) == 4
    assert cached_len(pool, text(1, 3)) == 0
    assert cached_len(pool, text(0, 3)[:3]) == 0


def test_a_block_counts_only_behind_its_own_prefix() -> None:
    pool = make_pool()
    file(pool, text(0, 2))
    assert cached_len(pool, text(4, 1)) == 0
    assert cached_len(pool, [*text(100, 1), *text(4, 1)]) == 0


@pytest.mark.parametrize(("one", "other"), [(-1, -2), (5, 5 + 2**61 - 1), (0, 2**61 - 1)])
def test_a_hash_collision_cannot_mix_up_prompts(one: int, other: int) -> None:
    """Python hashes these integers alike, so their keys fall into one place of the dictionary."""
    assert hash((ROOT_UID, (one,) * SIZE)) == hash((ROOT_UID, (other,) * SIZE))
    pool = make_pool()
    first = file(pool, [one] * SIZE)
    assert cached_len(pool, [other] * SIZE) == 0
    second = file(pool, [other] * SIZE)
    assert first != second
    assert pool.lookup([*[one] * SIZE, 0])[0] == first
    assert pool.lookup([*[other] * SIZE, 0])[0] == second


def test_the_same_content_twice_is_filed_once() -> None:
    pool = make_pool()
    first, second = pool.allocate(2)
    uid = pool.register(first, ROOT_UID, (1, 2, 3, 4))
    assert pool.register(second, ROOT_UID, (1, 2, 3, 4)) == uid, "what follows is filed behind the known block"
    child = pool.allocate(1)
    pool.register(child[0], uid, (5, 6, 7, 8))
    assert pool.lookup([1, 2, 3, 4, 5, 6, 7, 8, 9])[0] == [first, *child]
    pool.free([second])
    assert cached_len(pool, [1, 2, 3, 4]) == SIZE, "the copy was not the one that is filed"


def test_unfiled_blocks_go_first_then_the_longest_unused() -> None:
    pool = make_pool()
    old, new = file(pool, text(0, 2)), file(pool, text(100, 2))
    pool.free(old)
    pool.free(new)
    assert set(pool.allocate(4)).isdisjoint(old + new)
    assert pool.allocate(2) == old[::-1], "the end of a prompt goes before its beginning"
    assert (cached_len(pool, text(0, 2)), cached_len(pool, text(100, 2))) == (0, 8)


def test_a_hit_makes_a_block_young_again() -> None:
    pool = make_pool(num_blocks=4)
    blocks = [file(pool, text(start, 1))[0] for start in (0, 100, 200)]
    pool.free(blocks[::-1])
    assert cached_len(pool, text(0, 1)) == SIZE
    assert pool.allocate(2) == blocks[1:]
    assert cached_len(pool, text(0, 1)) == SIZE


def test_held_blocks_are_not_evicted() -> None:
    pool = make_pool(num_blocks=4)
    held = file(pool, text(0, 2))
    assert pool.allocate(1)[0] not in held
    assert pool.num_free == 0
    assert cached_len(pool, text(0, 2)) == 8


def test_children_of_an_evicted_block_are_out_of_reach() -> None:
    """Also when the same tokens are filed in its place: the child's KV belonged to a block that is gone."""
    pool = make_pool(num_blocks=4)
    parent, child = file(pool, text(0, 2))
    pool.free([child])
    pool.free([parent])
    pool.lookup([*text(0, 2), 0])  # both held again
    pool.free([parent])  # the parent alone is given back, and is evicted
    assert pool.allocate(2)[1] == parent
    assert cached_len(pool, text(0, 2)) == 0
    pool.register(parent, ROOT_UID, tuple(text(0, 1)))
    assert cached_len(pool, text(0, 2)) == SIZE


def test_reset_forgets_all_and_leaves_held_blocks_with_their_holders() -> None:
    pool = make_pool()
    held, freed = file(pool, text(0, 2)), file(pool, text(100, 2))
    pool.free(freed)
    pool.reset_cache()
    assert (cached_len(pool, text(0, 2)), cached_len(pool, text(100, 2))) == (0, 0)
    assert pool.num_free == 6
    pool.free(held)
    assert sorted(pool.allocate(8)) == list(range(1, 9))


def test_filing_behind_a_block_that_was_forgotten_reaches_nobody() -> None:
    pool = make_pool()
    first, second = pool.allocate(2)
    uid = pool.register(first, ROOT_UID, tuple(text(0, 1)))
    pool.reset_cache()
    pool.register(second, uid, tuple(text(4, 1)))
    assert cached_len(pool, text(0, 2)) == 0
    file(pool, text(0, 1))
    assert cached_len(pool, text(0, 2)) == SIZE


def test_without_caching_nothing_is_found() -> None:
    pool = make_pool(caching=False)
    pool.free(file(pool, text(0, 2)))
    assert cached_len(pool, text(0, 2)) == 0
    assert pool.num_free == 8


@pytest.mark.parametrize("seed", range(100))
def test_against_a_list_of_everything_ever_filed(seed: int) -> None:
    """Random requests: what a look-up returns was filed with just these tokens, and no block is lost or held twice."""
    rng = random.Random(seed)
    pool = make_pool(num_blocks=12)
    content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end, when it was last filed
    held: list[list[int]] = []
    for _ in range(200):
        if held and (pool.num_free < 4 or rng.random() < 0.4):
            pool.free(held.pop(rng.randrange(len(held))))
        else:
            tokens = [rng.randrange(2) for _ in range(rng.randint(1, 4) * SIZE)]
            blocks, uid = pool.lookup(tokens)
            for index, block in enumerate(blocks):
                assert content[block] == tuple(tokens[: (index + 1) * SIZE])
            fresh = pool.allocate(len(tokens) // SIZE - len(blocks))
            assert not set(fresh) & {block for request in held for block in request}
            assert 0 not in fresh
            for index in range(len(blocks), len(blocks) + len(fresh)):
                block = fresh[index - len(blocks)]
                content[block] = tuple(tokens[: (index + 1) * SIZE])
                uid = pool.register(block, uid, tuple(tokens[index * SIZE : (index + 1) * SIZE]))
            held.append(blocks + fresh)
        assert pool.num_free == 11 - len({block for request in held for block in request})
