"""Published checkpoints in the Hugging Face and the MLX layout: their configs and their weight names.

``configs`` reads a config.json (``vision_configs`` its tower), ``names`` finds the weights of our models under the
names of either layout, ``identity`` says what a set of weight names is, ``layouts`` writes both, ``processors`` what
belongs beside a tower, ``sizes`` lists what can be synthesised.
Nothing here opens a file.
"""

from reference_models.hf.configs import MODEL_TYPES, config_from_json
from reference_models.hf.fields import ConfigError
from reference_models.hf.identity import claimed_families, contradiction

__all__ = ["MODEL_TYPES", "ConfigError", "claimed_families", "config_from_json", "contradiction"]
