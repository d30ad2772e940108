"""The visible set against the definition, token by token."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from harness.ledger import SequenceLedger
from harness.operations import Operation, Prefill, Rollback, TrimFront
from harness.oracle import key_positions, visible_set

histories = st.lists(
    st.one_of(
        st.builds(Prefill, st.integers(1, 9)),
        st.builds(TrimFront, st.integers(0, 12), st.integers(0, 4)),
        st.builds(Rollback, st.integers(0, 12)),
    ),
    min_size=1,
    max_size=10,
)


@settings(max_examples=120, deadline=None)
@given(histories, st.none() | st.integers(1, 12))
def test_the_visible_set_is_held_or_earlier_in_the_chunk_or_itself(
    history: list[Operation], window: int | None
) -> None:
    ledger = SequenceLedger()
    for operation in history:
        if not isinstance(operation, Prefill):
            ledger.remove(operation)
            continue
        held = list(ledger.held)
        append = ledger.append(operation.tokens)
        chunk = list(append.positions)
        keys, visible = key_positions(append), visible_set(append, window)
        assert keys.tolist() == held + chunk
        assert visible.shape == (len(chunk), len(held) + len(chunk)) and visible.dtype == bool
        for row, token in enumerate(chunk):
            for slot, key in enumerate(keys.tolist()):
                earlier = key in chunk[:row]
                near = window is None or key > token - window
                assert visible[row, slot] == (near and (key == token or key in held or earlier))
        assert visible.any(-1).all()  # an all-masked row would give NaN


def test_by_hand_behind_sinks_and_a_rollback() -> None:
    ledger = SequenceLedger()
    ledger.append(6)
    ledger.trim_front(3, keep=1)  # held 0 4 5
    ledger.rollback(1)  # held 0 4
    append = ledger.append(2)
    assert key_positions(append).tolist() == [0, 4, 5, 6]
    assert visible_set(append).tolist() == [[True, True, True, False], [True, True, True, True]]


def test_a_window_counts_positions_not_slots() -> None:
    ledger = SequenceLedger()
    ledger.append(6)
    ledger.trim_front(3, keep=1)  # held 0 4 5
    append = ledger.append(2)  # positions 6 7
    assert visible_set(append, 3).tolist() == [[False, True, True, True, False], [False, False, True, True, True]]
    assert visible_set(append, 1).tolist() == [[False] * 3 + [True, False], [False] * 3 + [False, True]]
    assert (visible_set(append, 8) == visible_set(append)).all()


def test_one_token_sees_everything() -> None:
    ledger = SequenceLedger()
    assert visible_set(ledger.append(1)).tolist() == [[True]]
    ledger.append(3)
    assert visible_set(ledger.append(1)).all()
