"""How often programs get deep: the share of those that a profile draws which reach each of a few states.

Programs are drawn for the targets of a family as a campaign draws them, and applied without judging.

* ``wrapped``: a key fell out of a sliding window or of a cache's own rule
* ``256 slots``: a cache grew past 256 slots
* ``cut image``: a trim or a rollback cut an image, or a chunk began inside one (of prompts with images)
* ``zero, on``: a trim left nothing, and the sequence went on
* ``trims, back``: two front trims, then a rollback to where the last one found the sequence, and on

    python tests/bench/depths.py [--profile quick] [--seed 0] [FAMILY ...]
"""

from __future__ import annotations

import os

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
