"""Checkpoints: find, check, identify, digest, load, synthesise.

``open_checkpoint(path or hub id)`` -> Checkpoint, ``load_model(checkpoint)`` -> our model with its weights,
``fingerprint(checkpoint)``, ``synthesise(family, folder)``; ``open_files(folder)`` -> Files, of any model type.
Whatever is wrong with a checkpoint is a CheckpointError of one line.
"""

from harness.checkpoints.checkpoint import Checkpoint, open_checkpoint
from harness.checkpoints.description import as_dict, describe
from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.files import Files, open_files
from harness.checkpoints.fingerprint import Fingerprint, fingerprint
from harness.checkpoints.inputs import Inputs, rows_of
from harness.checkpoints.loading import check, load_model, not_a_number
from harness.checkpoints.logits import greedy, logits
from harness.checkpoints.memory import Footprint, footprint, free_bytes
from harness.checkpoints.synthesis import synthesise
from reference_models.registry import UnknownFamily

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Files",
    "Fingerprint",
    "Footprint",
    "Inputs",
    "UnknownFamily",
    "as_dict",
    "check",
    "describe",
    "fingerprint",
    "footprint",
    "free_bytes",
    "greedy",
    "load_model",
    "logits",
    "not_a_number",
    "open_checkpoint",
    "open_files",
    "rows_of",
    "synthesise",
]
