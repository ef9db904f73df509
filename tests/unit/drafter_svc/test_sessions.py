"""Sessions of a drafter: what fits is drafted for, and what does not fit costs that row alone."""

from __future__ import annotations

import pytest
import torch

from common.draft_exchange import (
    Branch,
    DrafterLimits,
    ModelIdentity,
    RowClosed,
    RowCommitted,
    RowError,
    RowOpened,
    SessionUpdate,
    VerifierHello,
)
from common.errors import InvalidArgumentError, UnknownOptionError
from drafter_svc.builder import build_core
from drafter_svc.config import DrafterConfig
from drafter_svc.core import DrafterCore, MismatchError
from drafter_svc.methods.registry import METHOD_NAMES, build_method
from drafter_svc.sessions import RowPool, VerifierSessions
from model_executor.row_state import RowState

VOCAB_SIZE = 100
TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5]  # goes on with 6, 7, 8, ...
LIMITS = DrafterLimits(max_rows=4, max_model_len=32, max_frame_tokens=1 << 10, max_branch_len=16)


def make_core(num_rows: int = 4) -> DrafterCore:
    rows = RowState(num_rows, LIMITS.max_model_len, 16, torch.device("cpu"))
    method = build_method("ngram", {"prompt_lookup_max": 5, "prompt_lookup_min": 2})
    return DrafterCore(method, "ngram", RowPool(rows), LIMITS, ModelIdentity())


def make_hello(**changes: object) -> VerifierHello:
    values = {
        "verifier_id": "v",
        "model": ModelIdentity(vocab_size=VOCAB_SIZE),
        "max_model_len": 32,
        "max_rows": 4,
        "branch_budget": 2,
        "branch_len": 8,
    }
    return VerifierHello(**(values | changes))  # type: ignore[arg-type]


def opened(row: int, generation: int = 1, tokens: list[int] = TEXT, max_len: int = 32) -> RowOpened:
    return RowOpened(row, generation, f"request-{row}", tokens, len(tokens), max_len, 3, 0, 0.0, 1.0, 0, 0.0)


def open_rows(*rows: RowOpened) -> SessionUpdate:
    return SessionUpdate(opened=list(rows))


def commit(row: int, base_len: int, tokens: list[int], generation: int = 1) -> SessionUpdate:
    return SessionUpdate(committed=[RowCommitted(row, generation, base_len, tokens)])


def draft(core: DrafterCore, sessions: VerifierSessions) -> list[Branch]:
    (batch,) = core.draft([sessions])
    return batch.to_list()


@pytest.fixture
def core() -> DrafterCore:
    return make_core()


@pytest.fixture
def sessions(core: DrafterCore) -> VerifierSessions:
    return core.connect(make_hello())


def test_drafts_for_what_has_changed_and_nothing_else(core: DrafterCore, sessions: VerifierSessions) -> None:
    assert sessions.apply(open_rows(opened(0), opened(2, tokens=[9, 8, 7]))) == []
    assert draft(core, sessions) == [Branch(0, 1, 13, [6, 7, 8, 1, 2, 3, 4, 5])]
    assert draft(core, sessions) == []
    assert sessions.apply(commit(0, 13, [6, 7])) == []
    assert draft(core, sessions) == [Branch(0, 1, 15, [8, 1, 2, 3, 4, 5, 6, 7])]


def test_several_commits_of_a_row_in_one_update(core: DrafterCore, sessions: VerifierSessions) -> None:
    sessions.apply(open_rows(opened(0)))
    two = SessionUpdate(committed=[RowCommitted(0, 1, 13, [6]), RowCommitted(0, 1, 14, [7, 8])])
    assert sessions.apply(two) == []
    assert draft(core, sessions) == [Branch(0, 1, 16, [1, 2, 3, 4, 5, 6, 7, 8])]


def test_a_branch_ends_where_the_request_does(core: DrafterCore, sessions: VerifierSessions) -> None:
    sessions.apply(open_rows(opened(0, max_len=16)))
    assert draft(core, sessions) == [Branch(0, 1, 13, [6, 7, 8])]
    sessions.apply(commit(0, 13, [6, 7, 8]))
    assert draft(core, sessions) == []


def test_a_gap_closes_that_row_and_nothing_else(core: DrafterCore, sessions: VerifierSessions) -> None:
    sessions.apply(open_rows(opened(0), opened(1)))
    draft(core, sessions)
    update = SessionUpdate(committed=[RowCommitted(0, 1, 15, [8]), RowCommitted(1, 1, 13, [6])])
    (error,) = sessions.apply(update)
    assert error == RowError(0, 1, "base_len: expected 13, the tokens that are there; found 15")
    assert [branch.row for branch in draft(core, sessions)] == [1]
    assert len(sessions) == 1
    (again,) = sessions.apply(commit(0, 16, [1]))
    assert "not open" in again.reason
    assert sessions.apply(open_rows(opened(0, generation=2))) == []
    assert [branch.row for branch in draft(core, sessions)] == [0]


def test_duplicates_are_dropped_and_counted(core: DrafterCore, sessions: VerifierSessions) -> None:
    sessions.apply(open_rows(opened(0)))
    sessions.apply(commit(0, 13, [6, 7]))
    assert sessions.apply(commit(0, 13, [6, 7])) == []
    assert sessions.apply(open_rows(opened(0))) == []
    assert (core.stats.num_duplicates, core.stats.num_stale) == (1, 1)
    assert draft(core, sessions) == [Branch(0, 1, 15, [8, 1, 2, 3, 4, 5, 6, 7])]


def test_older_generations_are_dropped_and_counted(core: DrafterCore, sessions: VerifierSessions) -> None:
    sessions.apply(open_rows(opened(0, generation=5)))
    for update in (
        commit(0, 13, [6], generation=4),
        open_rows(opened(0, generation=4)),
        SessionUpdate(closed=[RowClosed(0, 4)]),
    ):
        assert sessions.apply(update) == []
    assert core.stats.num_stale == 3
    assert len(sessions) == 1
    sessions.apply(SessionUpdate(closed=[RowClosed(0, 5)]))
    # What comes after the end of a generation is as old as what came before it.
    assert sessions.apply(commit(0, 13, [6], generation=5)) == []
    assert sessions.apply(open_rows(opened(0, generation=5))) == []
    assert len(sessions) == 0
    assert core.stats.num_stale == 5


def test_a_row_that_is_opened_anew_gives_its_old_session_back(core: DrafterCore, sessions: VerifierSessions) -> None:
    for generation in range(1, 20):
        assert sessions.apply(open_rows(opened(0, generation))) == []
    assert core.load().num_rows == 1


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (open_rows(opened(4)), "row: expected a row below 4, found 4"),
        (open_rows(opened(-1)), "row: expected a row below 4, found -1"),
        (open_rows(opened(0, tokens=[1, VOCAB_SIZE])), "token_ids: expected ids from 0 to 99"),
        (open_rows(opened(0, tokens=[-1])), "token_ids: expected ids from 0 to 99"),
        (open_rows(opened(0, tokens=[1] * 32)), "token_ids: expected fewer than max_model_len = 32 tokens, found 32"),
        (commit(3, 0, [1]), "row: tokens were committed to a row that is not open"),
        (commit(9, 0, [1]), "row: tokens were committed to a row that is not open"),
    ],
)
def test_what_cannot_be_is_a_row_error(sessions: VerifierSessions, update: SessionUpdate, reason: str) -> None:
    (error,) = sessions.apply(update)
    assert error.reason == reason
    assert len(sessions) == 0


def test_a_wrong_token_in_a_commit(core: DrafterCore, sessions: VerifierSessions) -> None:
    sessions.apply(open_rows(opened(0)))
    (error,) = sessions.apply(commit(0, 13, [VOCAB_SIZE]))
    assert "expected ids" in error.reason
    assert core.load().num_rows == 0


def test_a_row_that_outgrows_the_drafter(core: DrafterCore, sessions: VerifierSessions) -> None:
    sessions.apply(open_rows(opened(0, max_len=1000)))
    assert sessions.apply(commit(0, 13, [1] * 19)) == []
    assert draft(core, sessions) == []
    (error,) = sessions.apply(commit(0, 32, [1]))
    assert error.reason == "token_ids: expected at most max_model_len = 32 tokens, found 33"


def test_rows_are_bounded_and_shared(core: DrafterCore) -> None:
    first, second = core.connect(make_hello()), core.connect(make_hello())
    assert first.apply(open_rows(*(opened(row) for row in range(3)))) == []
    errors = second.apply(open_rows(opened(0), opened(1)))
    assert [(error.row, error.reason) for error in errors] == [(1, "no free row: all 4 rows of the drafter are taken")]
    batches = core.draft([first, second])
    assert [[branch.row for branch in batch.to_list()] for batch in batches] == [[0, 1, 2], [0]]
    core.disconnect(first)
    core.disconnect(first)
    assert core.load().num_rows == 1
    assert core.load().num_streams == 1
    assert second.apply(open_rows(opened(1, generation=2))) == []
    core.disconnect(second)
    assert core.load().num_rows == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"protocol_version": 2}, "protocol version: the drafter speaks 1, the verifier 2"),
        ({"model": ModelIdentity("", "", 101)}, "vocab_size: the drafter has 100, the verifier 101"),
        ({"model": ModelIdentity("", "other", 100)}, "vocabulary: the drafter has ours, the verifier other"),
    ],
)
def test_a_verifier_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    core = make_core()
    model = ModelIdentity("some model", "ours", 100)
    core = DrafterCore(core._method, "ngram", core._pool, LIMITS, model)
    core.connect(make_hello(model=ModelIdentity("another model", "ours", 100)))
    core.connect(make_hello(model=ModelIdentity("", "", 100)))
    with pytest.raises(MismatchError) as caught:
        core.connect(make_hello(**changes))
    assert str(caught.value) == message
    assert caught.value.status == "FAILED_PRECONDITION"


@pytest.mark.parametrize(
    "changes", [{"max_rows": (1 << 16) + 1}, {"branch_len": 17}, {"branch_len": 0}, {"branch_budget": 0}]
)
def test_a_verifier_that_wants_too_much_is_refused(core: DrafterCore, changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(changes))):
        core.connect(make_hello(**changes))


def test_methods_by_name() -> None:
    assert METHOD_NAMES == ("ngram",)
    with pytest.raises(UnknownOptionError, match="did you mean 'ngram'"):
        build_core(DrafterConfig(method="n-gram"))
    with pytest.raises(InvalidArgumentError, match="prompt_lookup_min = 9"):
        DrafterConfig(prompt_lookup_min=9)
