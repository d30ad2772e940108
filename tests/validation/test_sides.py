"""What --engine, --before and --after stand for together."""

from __future__ import annotations

import pytest

from harness.validation.sides import EngineError, Side, Sides, control_side, sides_of, with_control

LIVE = Side("reference", "live")
SERVES = "wire:./serve --model a@b"


@pytest.mark.parametrize(
    ("engine", "before", "after", "expected"),
    [
        pytest.param(None, None, "live", Sides(LIVE), id="nothing"),
        pytest.param(
            "mlx_lm", "library", "live", Sides(Side("mlx_lm", "live"), Side("mlx_lm", "library")), id="policy"
        ),
        pytest.param("mlx_lm", None, "mlx_lm", Sides(Side("mlx_lm", "live")), id="the same engine twice"),
        pytest.param(
            *(None, "mlx_lm", "reference", Sides(LIVE, Side("mlx_lm", "live"), "--after")), id="an engine each"
        ),
        pytest.param(
            *(None, "offset", "mlx_lm", Sides(Side("mlx_lm", "live"), Side("mlx_lm", "offset"), "--after")),
            id="a policy alone is of the judged engine",
        ),
        pytest.param(
            *("reference", "mlx_lm@library", "offset", Sides(Side("reference", "offset"), Side("mlx_lm", "library"))),
            id="engine and policy",
        ),
        pytest.param(None, SERVES, "live", Sides(LIVE, Side(SERVES, "live")), id="a command with an at sign"),
        pytest.param(
            None, f"{SERVES}@offset", "live", Sides(LIVE, Side(SERVES, "offset")), id="and a policy behind it"
        ),
        pytest.param(
            *(None, None, "wire: x@live@offset", Sides(Side("wire:x@live", "offset"), None, "--after")),
            id="only the last at sign counts",
        ),
        pytest.param(f"{SERVES}@live", None, "live", Sides(Side(f"{SERVES}@live", "live")), id="no policy in --engine"),
    ],
)
def test_what_the_options_stand_for(engine: str | None, before: str | None, after: str, expected: Sides) -> None:
    assert sides_of(engine, before, after) == expected


def test_another_engine_is_one_of_another_name() -> None:
    assert sides_of(None, "mlx_lm", "reference").other == "mlx_lm"
    assert sides_of("mlx_lm", "mlx_lm@library", "live").other is None
    assert sides_of(None, None, "mlx_lm").other is None
    assert sides_of(None, "wire: old", "wire:new").other == "wire:old"
    assert str(sides_of(None, "wire: old", "wire:new").before) == "wire:old@live"


@pytest.mark.parametrize(
    ("engine", "before", "after", "words"),
    [
        pytest.param(None, "live", "live", "--before: 'live' is --after as well", id="itself"),
        pytest.param("mlx_lm", "mlx_lm", "live", "--before: 'mlx_lm' is --after as well", id="itself by its engine"),
        pytest.param("mlx_lm", None, "reference", "--after: 'reference' is judged, and --engine names", id="two"),
        pytest.param("mlx_lm", None, "library", "--after: 'library' has no front trim", id="judged without a trim"),
        pytest.param(None, None, "mlx_lm@library", "--after: 'mlx_lm@library' has no front", id="and of an engine"),
        pytest.param(None, "sideways", "live", "--before: 'sideways' is no engine; there are ref", id="no policy"),
        pytest.param(None, "mlx_lm@sideways", "live", "--before: 'mlx_lm@sideways' is no engine", id="nor behind @"),
        pytest.param(None, None, "", "--after: '' is no engine", id="empty"),
        pytest.param(None, "@live", "live", "--before: '' is no engine", id="a policy of nothing"),
        pytest.param(None, "wire: ", "live", "--before: 'wire: ' is no engine", id="no command"),
        pytest.param(None, "mlx_vlm", "live", "--before: 'mlx_vlm' reads no checkpoint here", id="mlx_vlm"),
        pytest.param("live", None, "live", "--engine: 'live' is no engine", id="a policy as engine"),
        pytest.param("mlx_lm@live", None, "live", "--engine: 'mlx_lm@live' is no engine", id="a side as engine"),
    ],
)
def test_what_stands_for_nothing(engine: str | None, before: str | None, after: str, words: str) -> None:
    with pytest.raises(EngineError) as raised:
        sides_of(engine, before, after)
    assert f"argument {words}" in str(raised.value) and "\n" not in str(raised.value)


def test_the_planted_bug_is_one_of_the_judged_engine() -> None:
    """That the bug would be found in one engine does not show that it would be in the other."""
    both, three = ("live", "offset"), ("live", "offset", "library")
    assert with_control("offset", "live", both) == {"after": "live", "before": "offset"}
    two = with_control("offset", "live", both, three)
    assert two == {"after": "live", "before": "offset", "control": "offset"}
    assert control_side(two, two_engines=True) == "control" and control_side(two) == "before"
    assert with_control("live", "live", both, ("live",)) == {"after": "live", "before": "live", "control": "offset"}
    assert with_control("live", "offset", both, both) == {"after": "offset", "before": "live"}
    only = with_control("offset", "live", ("live",), both)
    assert only == {"after": "live", "before": "offset"} and control_side(only, two_engines=True) is None
    with pytest.raises(EngineError, match="argument --before: this engine has live, not offset"):
        with_control("offset", "live", both, ("live",))
