"""Hypothesis strategies for the arguments of operations. Simplest first: that is where shrinking ends."""

from __future__ import annotations

import operator
from typing import TypeVar

from hypothesis import strategies as st

from harness.media import Media
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Decode,
    Generation,
    Operation,
    Owner,
    Prefill,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.rules import QuantisedStorage

T = TypeVar("T")


def weighted(*choices: tuple[int, st.SearchStrategy[T]]) -> st.SearchStrategy[T]:
    """Draw from ``strategy`` with the given whole-number weight; shrinks towards the first.

    ``one_of`` cannot do this: it drops repeated branches.
    """
    table = tuple(number for number, (weight, _) in enumerate(choices) for _ in range(weight))
    strategies = tuple(strategy for _, strategy in choices)
    return st.sampled_from(table).flatmap(strategies.__getitem__)


#: A KV cache grows by 256 slots; forwards of this size cost as much as fifteen small ones, so they are rare.
_EDGES = st.sampled_from((250, 255, 256, 257))

#: Tokens of a chunk: mostly few, so that shrinking and speed are good.
chunk_sizes = weighted((22, st.integers(2, 8)), (9, st.integers(2, 24)), (1, _EDGES))
prefill_sizes = weighted((7, st.integers(2, 8)), (8, st.integers(1, 32)), (1, _EDGES))
decode_times = st.integers(1, 8)

#: How many keys to drop: a few, or more than can be there (the clamp: trim to zero).
trim_counts = weighted((7, st.integers(1, 12)), (2, st.integers(0, 64)), (1, st.just(10_000)))
#: Few, so that the second finds something as well.
two_trims = st.tuples(st.integers(1, 3), st.integers(1, 3))
#: Sinks of both, or of one of them; most often of the second, which the first has left an odd place to count from.
two_keeps = st.tuples(
    weighted((2, st.just(0)), (1, st.integers(1, 4))), weighted((1, st.just(0)), (2, st.integers(1, 4)))
)
rollback_counts = weighted((6, st.integers(1, 6)), (2, st.integers(0, 32)), (1, st.just(10_000)))
#: Of a rollback behind trims: of all keys that they left, or only of what came since?
rewinds = weighted((3, st.just(False)), (1, st.just(True)))
#: How many keys to drop while a prompt with images is still being read.
early_trims = weighted((2, st.just(0)), (1, st.integers(1, 6)))
sinks = weighted((3, st.just(0)), (2, st.integers(1, 6)), (1, st.just(10_000)))

#: How far a bound lies below what the next token would see: 0 leaves it alone, a large one means a bound of 1. Few most
#: often, for rings of few slots.
FAR = 10_000
excesses = weighted((5, st.integers(1, 4)), (4, st.integers(1, 12)), (2, st.integers(0, 64)), (1, st.just(FAR)))
Bound = tuple[Generation, int, int]
#: Slots that a context shift is to keep: none, few, or more than its bound leaves room for; and what it is to discard:
#: half of the others, few, or more than there are.
_shift_keeps = weighted((3, st.just(0)), (4, st.integers(1, 8)), (2, st.just(10_000)))
_discards = weighted((4, st.just(0)), (3, st.integers(1, 16)), (1, st.just(10_000)))
#: A generation with both, which only the last one takes; that one twice as often as the others, for all there is to it.
bounds: st.SearchStrategy[Bound] = weighted(
    (1, st.just(("trim", 4, 0))),
    (1, st.just(("sinks", 4, 0))),
    (2, st.tuples(st.just("shift"), _shift_keeps, _discards)),
)
#: How often a server enforces its bound and goes on, and with how many drafts: none means one token.
bounded_rounds = st.integers(2, 3)
drafts_or_none = weighted((2, st.just(0)), (1, st.integers(1, 6)))

#: A verify round: how many tokens are drafted, and how many of them are accepted (to be cut to those drafted).
drafts = weighted((8, st.integers(1, 6)), (1, st.integers(1, 24)))
accepts = st.integers(0, 6)
rounds = st.integers(1, 2)

#: Slots for snapshots: few, so that they are written twice and read twice.
slots = weighted((6, st.just(0)), (2, st.just(1)), (1, st.integers(2, 3)))
Storages = tuple[QuantisedStorage, QuantisedStorage]
#: What a cache is quantised to: where the widths of its rows fit Int8 alone, and where they fit any storage.
storages: st.SearchStrategy[Storages] = st.tuples(
    weighted((3, st.just("int8")), (1, st.just("affine8")), (1, st.just("affine4"))),
    weighted((1, st.just("int8")), (2, st.just("affine8")), (2, st.just("affine4"))),
)
#: May it be what its rows do not fit, and with rows in it?
misfits = weighted((3, st.just(False)), (1, st.just(True)))
#: Is what is forked also kept in a slot?
kept = weighted((2, st.just(True)), (1, st.just(False)))
#: Are rows quantised before they join a batch?
quantised_first = weighted((2, st.just(False)), (1, st.just(True)))
#: Does it start again first?
freshly = st.booleans()
#: What happens between a snapshot and its return.
detours = st.sampled_from(("chunk", "decode", "trim", "rollback", "enforce", "reset", "fork"))
times_back = st.integers(1, 2)

Few = tuple[Operation, ...]
Deep = tuple[TrimFront | Decode | Verify, ...]
#: Done at once behind the first prefill: a snapshot, so that every later restore has something to give back, or a
#: verify round, so that whatever follows stands where drafts were rejected.
_early: st.SearchStrategy[Few] = weighted(
    (3, st.just(())),
    (3, st.just((Snapshot(0),))),
    (2, st.builds(lambda k, a: (Verify(k, min(a, k)),), st.integers(1, 6), st.integers(0, 6))),
    (1, st.just((Snapshot(0), Verify(4, 2)))),
)
#: What comes right before an operation on the whole state of a sequence, which is right in plain states more often than
#: in those that only some sequence of operations leads to: a gap behind sinks, a ring that has turned, drafts
#: rejected, a front trimmed.
deep: st.SearchStrategy[Deep] = weighted(
    (6, st.just(())),
    (2, st.just((TrimFront(2, 2),))),
    (3, st.builds(lambda times: (Decode(times),), st.integers(4, 9))),
    (1, st.just((Verify(3, 1),))),
    (1, st.just((TrimFront(3),))),
)
#: Done at the end of a program, behind one of the above, when its caches have been through most: what they hold is
#: compared, which needs no forward; or all sequences meet in a batch, whatever they have become.
_ends: tuple[Few, ...] = (
    (),
    (SaveLoad(), QuantizeCache("int8"), SaveLoad()),
    (QuantizeCache("affine8"), SaveLoad(), Decode(2)),
    (SaveLoad(), Reset(), QuantizeCache("affine4")),  # most rows do not fit, and there is none to see that by
    (SaveLoad(), Restore(0), SaveLoad()),
    (Restore(0),),
    (Batch((0, 1, 2)), BatchForward((2, 1)), BatchDecode(1)),
    (Decode(5), QuantizeCache("int8"), QuantizeCache("int8", 1), Batch((0, 1)), BatchForward((2, 1))),
    # The first row goes back by less than it got, the second by more: what stood there it may have forgotten.
    (Batch((0, 1)), BatchForward((5, 1)), Rollback(3, 0), Rollback(3, 1), BatchDecode(1)),
    # The longer one leaves; whatever it does not take along the other may write over.
    (Batch((0, 1)), BatchForward((9, 1)), Batch((1,)), BatchDecode(5), Batch((1, 0)), BatchDecode(1)),
)
Frame = tuple[Few, Few]
frames: st.SearchStrategy[Frame] = st.tuples(_early, st.builds(operator.add, deep, st.sampled_from(_ends)))

_ONE: tuple[Owner, ...] = ("pool",)
#: Who owns the sequences of a program.
owner_layouts: st.SearchStrategy[tuple[Owner, ...]] = weighted(
    (6, st.just(_ONE)),
    (8, st.just(("pool", "pool"))),
    (5, st.just(("pool", "pool", "pool"))),
    (2, st.just(("pool", "model"))),
    (1, st.just(("model", "pool"))),
    (1, st.just(("model",))),
)
#: The same where what matters is who is served beside whom.
several_owners: st.SearchStrategy[tuple[Owner, ...]] = weighted(
    (1, st.just(("pool", "pool"))), (2, st.just(("pool", "pool", "pool")))
)
#: How the second sequence begins: with a prefill of its own, as a fork of the first, or left empty, which shows what
#: trims do to an empty cache.
second_starts = weighted((4, st.just("prefill")), (3, st.just("fork")), (1, st.just("empty")))
#: Which sequence an operation acts on, to be taken modulo their number.
sequences = st.integers(0, 2)

#: Who is in a batch, in which order, to be taken modulo the number of sequences: two or three of them, or one alone.
batch_orders = st.sampled_from(((0, 1), (0, 1, 2), (1, 0), (2, 0, 1), (1, 2), (2, 0), (0,), (1,), (2, 1, 0)))
#: How many tokens its rows get in one forward: as many each, or not.
row_tokens = weighted(
    (3, st.tuples(st.integers(1, 6))),
    (5, st.tuples(st.integers(1, 8), st.integers(1, 8))),
    (3, st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, 6))),
)
#: How many tokens each row decodes then: what a server does most of the time.
batch_decodes = weighted((1, st.just(0)), (1, st.integers(1, 4)))

#: Does the second sequence get its prompt first?
turns = weighted((3, st.just(False)), (1, st.just(True)))
#: Which position inside an image, to be taken modulo their number.
image_positions = st.integers(0, 15)
_sides = weighted((14, st.integers(1, 3)), (1, st.integers(4, 9)))
_frames = weighted((18, st.just(0)), (6, st.integers(1, 3)), (1, st.integers(4, 6)))
_gaps = weighted((24, st.integers(0, 4)), (1, st.sampled_from((60, 120, 250))))
_counts = weighted((8, st.just(1)), (4, st.just(2)), (2, st.just(3)), (1, st.integers(4, 5)))


@st.composite
def image_prefills(draw: st.DrawFn, sequence: int = 0) -> Prefill:
    """A prompt with images or videos, all of it in one forward or cut: most cuts fall into an image.

    Mostly one to three small ones; large ones, many, and such that start far behind are rare, and there.
    """
    media: list[Media] = []
    free = 0
    for _ in range(draw(_counts)):
        media.append(Media(free + draw(_gaps), draw(_sides), draw(_sides), draw(_frames)))
        free = media[-1].end
    whole = weighted((8, st.integers(free, free + 6)), (8, st.integers(1, free)), (1, _EDGES))
    return Prefill(draw(whole), sequence, media=tuple(media))


@st.composite
def prefills(draw: st.DrawFn, sequence: int = 0) -> Prefill:
    """Of a sequence beside one with images: text, or images of its own."""
    return Prefill(draw(prefill_sizes), sequence) if draw(st.booleans()) else draw(image_prefills(sequence))
