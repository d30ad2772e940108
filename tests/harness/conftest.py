"""Loads the modules that tests share under names that they can import: importlib mode puts no folder on the path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SHARED = ("fake_attention", "fake_bugs", "fake_batch", "fake_copies", "fake_target", "on_fakes", "on_copies")
for shared in SHARED:  # each builds on those before it
    name = f"kv_harness_{shared}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{shared}.py"))
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
