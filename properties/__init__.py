"""What must hold. One module per group, one sentence per property; the tuple below is all of them, in the order in
which they are judged (the cause before its consequences: a wrong mask before the crash that it leads to)."""

from __future__ import annotations

from harness.judging import Property
from properties.attention import AttentionEqualsFloat64
from properties.batches import BatchesKeepTheirRows, BatchRowsEqualSoloRuns
from properties.completion import EveryForwardGivesFiniteLogits, EveryOperationCompletes
from properties.copies import (
    ForksShareNothing,
    SaveAndLoadChangeNothing,
    SequencesAreIsolated,
    SnapshotsGiveBackWhatTheyTook,
)
from properties.lengths import KeysEqualLedgerLiveLength, TrimReportsWhatItRemoved
from properties.masks import MaskKeyAxisEqualsLiveKeys, MaskShowsExactlyTheVisibleSet
from properties.memory import MemoryIsGivenBack, NothingIsKeptAlive
from properties.outputs import OutputsEqualTheCacheFreeForward, OutputsEqualTheWitness
from properties.positions import PositionsAreAbsolute
from properties.purity import OperationsArePure
from properties.quantised import QuantisedRowsStayWithinTheirBound
from properties.reproducibility import SameProgramSameBytes, UntrimmedOutputsAreByteIdentical
from properties.retold import ChunksEqualOneShot, RollbackEqualsNeverSpeculated
from properties.rows import CachedRowsStayWhatTheyWere

ALL: tuple[Property, ...] = (
    MaskKeyAxisEqualsLiveKeys(),
    KeysEqualLedgerLiveLength(),
    MaskShowsExactlyTheVisibleSet(),
    PositionsAreAbsolute(),
    TrimReportsWhatItRemoved(),
    BatchesKeepTheirRows(),
    CachedRowsStayWhatTheyWere(),
    QuantisedRowsStayWithinTheirBound(),
    SnapshotsGiveBackWhatTheyTook(),
    ForksShareNothing(),
    SequencesAreIsolated(),
    SaveAndLoadChangeNothing(),
    MemoryIsGivenBack(),
    EveryOperationCompletes(),
    EveryForwardGivesFiniteLogits(),
    SameProgramSameBytes(),
    OperationsArePure(),
    AttentionEqualsFloat64(),
    UntrimmedOutputsAreByteIdentical(),
    BatchRowsEqualSoloRuns(),
    OutputsEqualTheCacheFreeForward(),
    OutputsEqualTheWitness(),
    RollbackEqualsNeverSpeculated(),
    ChunksEqualOneShot(),
    NothingIsKeptAlive(),  # the last: nobody can go on with the run behind it
)

BY_ID: dict[str, Property] = {prop.id: prop for prop in ALL}
