"""A tokenizer without merges: one token per byte, the special tokens, and nothing but numbered names for
the rest. Enough for any loader."""

from __future__ import annotations

from typing import Any

from reference_models.hf.sizes import SPECIAL, token_id

_END, _START, _STOP = SPECIAL[:3]


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def tokenizer_files(vocab_size: int) -> dict[str, dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json; empty when the model's vocabulary is too small for it."""
    if vocab_size < 256 + len(SPECIAL):
        return {}
    special = [
        {
            "id": 256 + index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, text in enumerate(SPECIAL)
    ]
    # A random model says any of its tokens, and a detokeniser wants a text for each.
    reserved = [f"<|reserved_{number}|>" for number in range(256 + len(SPECIAL), vocab_size)]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": bytes_only,
        "post_processor": None,
        "decoder": bytes_only,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {text: number for number, text in enumerate([*_byte_characters(), *SPECIAL, *reserved])},
            "merges": [],
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END,
        "eos_token": _STOP,
        "pad_token": _END,
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def generation_config() -> dict[str, Any]:
    """Greedy, with the tokens that end."""
    return {
        "bos_token_id": token_id(_END),
        "eos_token_id": [token_id(_STOP), token_id(_END)],
        "pad_token_id": token_id(_END),
        "do_sample": False,
    }
