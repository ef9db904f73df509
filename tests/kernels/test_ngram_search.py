"""n-gram search in texts of many splits against a search of every place."""

from __future__ import annotations

import pytest
import torch

from model_executor.kernels.ngram_search import ngram_search, ngram_search_ref

NUM_ROWS = 7


@pytest.mark.parametrize("max_model_len", [6400, 5003])  # rows of whole 16-byte loads, and others
@pytest.mark.parametrize("vocab_size", [2, 50, 30000])
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (4, 2), (7, 3)])
def test_against_a_search_of_every_place(
    device: torch.device, max_model_len: int, vocab_size: int, longest: int, shortest: int
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    token_ids = torch.randint(0, vocab_size, (NUM_ROWS, max_model_len), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([max_model_len, 1, 2, 2049, 2050, 4095, 3000])
    for row, length in enumerate(lengths.tolist()):
        # What ends the text stands once more somewhere, in some rows across the border of two splits; and behind the
        # text, where only claims stand, it must not be found.
        if length > 3000:
            token_ids[row, 2045:2053] = token_ids[row, length - 8 : length]
        token_ids[row, length:] = token_ids[row, length - 1]
    finished = torch.zeros(NUM_ROWS, dtype=torch.bool)
    finished[6] = True
    idx_mapping = torch.tensor([5, 0, 6, 3, 1, 4, 2])
    token_ids, lengths, finished, idx_mapping = (t.to(device) for t in (token_ids, lengths, finished, idx_mapping))
    best = torch.full((NUM_ROWS,), -1, dtype=torch.int64, device=device)
    ngram_search(token_ids, lengths, finished, idx_mapping, best, longest, shortest)
    expected = ngram_search_ref(token_ids, lengths, finished, idx_mapping, longest, shortest)
    assert torch.equal(best, expected)
    assert int((expected >= 0).sum()) >= 2
    assert expected[2] == -1


def test_a_better_match_stands(device: torch.device) -> None:
    token_ids = torch.tensor([[1, 2, 3, 1, 2, 3]], dtype=torch.int32, device=device)
    length, row = torch.tensor([6], device=device), torch.tensor([0], device=device)
    finished = torch.tensor([False], device=device)
    found = (3 << 32) + 2
    for before, after in ((-1, found), (found + 1, found + 1)):
        best = torch.tensor([before], device=device)
        ngram_search(token_ids, length, finished, row, best, 4, 2)
        assert best.tolist() == [after]
