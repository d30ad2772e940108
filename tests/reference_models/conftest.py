"""Loads ``vision_cases.py`` under a name that test modules can import: importlib mode puts no folder on the path."""

import importlib.util
import sys
from pathlib import Path

NAME = "kv_harness_vision_cases"

if NAME not in sys.modules:
    spec = importlib.util.spec_from_file_location(NAME, Path(__file__).with_name("vision_cases.py"))
    assert spec is not None and spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
