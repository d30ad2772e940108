"""The smaller programs in which a finding of a validation is looked for: of the plan's own build, smallest first."""

from __future__ import annotations

import pytest

from harness.operations import Chunk, EnforceMaxKvSize, Operation, Prefill, TrimFront, tokens_of
from harness.validation.plan import Asked, Planned, make_plan
from harness.validation.smaller import smaller

ASKED = {
    "default": Asked(),
    "small": Asked(16, 8, 40, 2),
    "large": Asked(1024, 512, 4096, 32),
    "many chunks": Asked(2048, 16, 2560, 0),
    "bound below a chunk": Asked(3, 64, 512, 8),
    "chunks of two": Asked(7, 2, 40, 1),
}


def planned(asked: Asked, name: str) -> Planned:
    return next(each for each in make_plan(asked, images=True).programs if each.name == name)


@pytest.mark.parametrize("name", ["untrimmed", "bounded", "sinks_and_rollback", "images"])
@pytest.mark.parametrize("asked", ASKED.values(), ids=list(ASKED))
def test_they_are_smaller_and_few(asked: Asked, name: str) -> None:
    whole = planned(asked, name)
    found = smaller(asked, whole, len(whole.program.operations) - 2)
    sizes = [(sum(map(tokens_of, program.operations)), len(program.operations)) for program in found]
    assert found and len(found) <= 12 and len(set(map(str, found))) == len(found)
    assert max(sizes) < (whole.tokens, len(whole.program.operations))
    assert str(found[-1]) == str(whole.program).rpartition(" ; ")[0] or name == "bounded"  # up to where it broke
    if name in ("bounded", "sinks_and_rollback"):
        assert all(Planned("", "", program).decisive for program in found)


def test_a_server_of_the_same_structure() -> None:
    found = smaller(ASKED["large"], planned(ASKED["large"], "bounded"), None)
    enforce = EnforceMaxKvSize(4)
    expected: tuple[Operation, ...] = (Prefill(2), enforce, Chunk(2), enforce, Chunk(2), enforce, Chunk(2))
    assert found[0].operations == expected
    assert found[1].operations[:7] == expected and "Decode(1)" in str(found[1])
    sinks = smaller(ASKED["large"], planned(ASKED["large"], "sinks_and_rollback"), None)
    assert [type(each) for each in sinks[0].operations] == [Prefill, Chunk, Chunk, Chunk, TrimFront, Chunk]


def test_images_are_only_cut() -> None:
    whole = planned(ASKED["default"], "images")
    assert [len(each.operations) for each in smaller(ASKED["default"], whole, 3)] == [4]
    assert [len(each.operations) for each in smaller(ASKED["default"], whole, 4)] == [4]


def test_what_broke_in_the_last_operation_is_not_tried_again_as_it_is() -> None:
    whole = planned(ASKED["small"], "bounded")
    found = smaller(ASKED["small"], whole, len(whole.program.operations) - 1)
    assert whole.program not in found and found
