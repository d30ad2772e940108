"""Loads the modules that tests share under names that they can import: importlib mode puts no folder on the path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for shared in ("engine/batch_programs", "engine/batch_bugs", "batch_runs"):
    name = f"kv_harness_{Path(shared).name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{shared}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
