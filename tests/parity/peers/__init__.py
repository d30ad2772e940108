"""The engines that the reference models are compared with."""

from tests.parity.peers.base import Engine, Peer, missing, version
from tests.parity.peers.with_llama import LlamaLayers
from tests.parity.peers.with_mlx_lm import MlxLm
from tests.parity.peers.with_mlx_vlm import MendedMlxVlm, MlxVlm
from tests.parity.peers.with_transformers import Transformers

PEERS: tuple[Peer, ...] = (Transformers(), LlamaLayers(), MlxLm(), MlxVlm(), MendedMlxVlm())

__all__ = ["PEERS", "Engine", "Peer", "missing", "version"]
