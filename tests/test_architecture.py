"""Imports point one way. Read from the source with ``ast``, so that an import inside a function counts as well."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Rooms from the inside out; a module may import from its own layer and from those before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    (
        "harness",
        "harness.media",
        "harness.batches",
        "harness.rules",
        "harness.operation",
        "harness.copies",
        "harness.trims",
        "harness.operations",
        "harness.ledger",
        "harness.findings",
        "harness.known_states",
        "harness.scratch",
        "harness.seeds",
        "harness.trace",
    ),
    (
        "harness.capability",
        "harness.calls",
        "harness.cells",
        "harness.target",
        "harness.words",
        "harness.rows_of_a_batch",
        "harness.comparison",
        "harness.oracle",
        "harness.quantised",
        "harness.images",
    ),
    (
        "harness.acting",
        "harness.emptying",
        "harness.steps",
        "harness.execution",
        "harness.judging",
        "harness.retelling",
        "harness.lives",
        "harness.judge",
        "harness.recording",
        "harness.replay",
        "harness.telling",
        "harness.tally",
        "harness.turns",
        "harness.witnessing",
    ),
    ("harness.batch_reduction", "harness.reduction", "harness.felt"),
    (
        "harness.strategies",
        "harness.program_rules",
        "harness.batch_rules",
        "harness.bound_rules",
        "harness.machine",
        "harness.image_machine",
        "harness.serving_machine",
        "harness.far_strategies",
        "harness.far_machine",
        "harness.machines",
        "harness.provider",
        "harness.profiles",
        "harness.campaign",
    ),
    ("properties.*",),
    ("harness.reporting.*",),
    (
        "harness.progress",
        "harness.known",
        "harness.runner",
        "harness.detection",
        "harness.verifying",
        "harness.pytest_plugin",
        "harness.shim.*",
        "harness.terminal",
        "harness.workers",
        "harness.validation.*",
        "harness.commands.*",
        "harness.cli",
    ),
)
#: Rooms beside the layers: what they are and what of the harness they may know.
BESIDE: dict[str, frozenset[int]] = {
    "harness.probe": frozenset({0, 1}),
    "harness.targets.*": frozenset({0, 1}),
    "harness.faults.*": frozenset({0}),
    "harness.wire.*": frozenset({0, 1}),
    "harness.checkpoints.*": frozenset({0}),
    "harness.known_failures.*": frozenset(),
    "harness.museum.*": frozenset(),
}
MAY_IMPORT = {
    "mlx": (
        "reference_models.*",
        "harness.targets.*",
        "harness.probe",
        "harness.checkpoints.*",
        "harness.faults.*",
        "harness.known_failures.*",
    ),
    "hypothesis": (
        "harness.strategies",
        "harness.program_rules",
        "harness.batch_rules",
        "harness.bound_rules",
        "harness.machine",
        "harness.image_machine",
        "harness.serving_machine",
        "harness.far_strategies",
        "harness.far_machine",
        "harness.provider",
        "harness.profiles",
        "harness.campaign",
    ),
    "numpy": (
        "harness.calls",
        "harness.cells",
        "harness.target",
        "harness.rows_of_a_batch",
        "harness.comparison",
        "harness.felt",
        "harness.oracle",
        "harness.quantised",
        "harness.images",
        "harness.recording",
        "harness.witnessing",
        "harness.probe",
        "harness.targets.*",
        "harness.checkpoints.*",
        "harness.commands.*",
        "harness.wire.*",
        "harness.validation.measuring",
        "properties.*",
        "reference_models.witness.*",
    ),
    "mlx_lm": ("harness.known_failures.*",),
    "mlx_vlm": ("harness.known_failures.*",),
    "rich": ("harness.progress",),
    "reference_models": ("reference_models.*", "harness.targets.*", "harness.checkpoints.*", "harness.faults.*"),
    "huggingface_hub": ("harness.checkpoints.locate",),
}


def _modules() -> dict[str, Path]:
    found = {}
    for package in ("harness", "properties", "reference_models"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _matches(module: str, pattern: str) -> bool:
    stem = pattern.removesuffix(".*")
    return module == stem or (pattern.endswith(".*") and module.startswith(stem + "."))


def _imports(module: str) -> set[str]:
    """Absolute names of the modules that ``module`` imports, relative ones resolved."""
    names: set[str] = set()
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names.add(base)
            names |= {f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in MODULES}
    return names


def _layer(module: str) -> int | None:
    for number, layer in enumerate(LAYERS):
        if any(_matches(module, pattern) for pattern in layer):
            return number
    return None


def test_the_rule_reads_imports_at_all() -> None:
    assert {"harness.operations", "harness.ledger"} <= _imports("harness.execution")
    assert "harness.runner" in _imports("harness.commands.run")  # inside a function


@pytest.mark.parametrize("module", sorted(name for name in MODULES if not name.startswith("reference_models")))
def test_imports_point_one_way(module: str) -> None:
    layer = _layer(module)
    beside = next((allowed for pattern, allowed in BESIDE.items() if _matches(module, pattern)), None)
    assert (layer is None) != (beside is None), f"{module} must have exactly one place in ARCHITECTURE.md and here"
    for name in _imports(module):
        if name not in MODULES or name.startswith("reference_models"):
            continue
        other = _layer(name)
        if layer is not None and other is not None:
            assert other <= layer, f"{module} (layer {layer}) imports {name} (layer {other})"
        elif beside is not None and other is not None:
            assert other in beside, f"{module} imports {name} (layer {other})"
        elif layer is not None:  # a target, a fault or the probe: only the outermost layer chooses one
            assert layer == len(LAYERS) - 1, f"{module} imports {name}: only the command line chooses a target"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_packages_stay_in_their_rooms(module: str) -> None:
    for name in _imports(module):
        top = name.split(".")[0]
        if top in MAY_IMPORT:
            assert any(_matches(module, pattern) for pattern in MAY_IMPORT[top]), f"{module} imports {name}"


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("reference_models")))
def test_reference_models_know_no_harness(module: str) -> None:
    tops = {name.split(".")[0] for name in _imports(module)}
    assert not tops & {"harness", "properties", "hypothesis", "pytest"}


WITNESS = "reference_models.witness"


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("reference_models")))
def test_the_witness_shares_no_code_with_what_it_judges(module: str) -> None:
    """Nor does a model look at the witness: what they agree on, they found apart."""
    ours = {name for name in _imports(module) if name in MODULES and name.startswith("reference_models.")}
    if _matches(module, f"{WITNESS}.*"):
        assert not {name for name in _imports(module) if name.split(".")[0] == "mlx"}
        assert all(_matches(name, f"{WITNESS}.*") for name in ours)
    else:
        assert not any(_matches(name, f"{WITNESS}.*") for name in ours)


@pytest.mark.parametrize("module", sorted(name for name in MODULES if name.startswith("harness")))
def test_the_harness_knows_no_family_by_name(module: str) -> None:
    from reference_models.registry import FAMILIES

    code = ast.parse(MODULES[module].read_text())
    text = {node.value for node in ast.walk(code) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    docs = {
        ast.get_docstring(n, clean=False)
        for n in ast.walk(code)
        if isinstance(n, (ast.Module, ast.ClassDef, ast.FunctionDef))
    }
    assert not {(family, line) for line in text - docs for family in FAMILIES if family in line}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_rooms_stay_small(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= 320, f"{module}: split it by meaning"
