"""The counters of ``harness.tally.Coverage`` in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from harness.tally import IMAGE_STATES

REACHED: dict[str, str] = {
    "programs": "programs run",
    "operations": "operations applied",
    "forwards": "forwards",
    "trimmed": "programs that trimmed the front of a cache",
    "trimmed_keeping_sinks": "programs that trimmed behind kept sinks",
    "trimmed_to_zero": "programs that trimmed a cache down to nothing",
    "rolled_back": "programs that rolled back",
    "chunk_after_trim": "programs that chunked after a trim",
    "decode_after_trim": "programs that decoded after a trim",
    "crossed_256_slots": "programs in which a cache grew past 256 slots",
    "crossed_512_slots": "programs in which a cache grew past 512 slots",
    "passed_position_1024": "programs with a position above 1,024",
    "several_sequences": "programs with several sequences",
    "model_owned": "programs with a model-owned sequence",
    "stopped_by_error": "programs that an error broke off",
    "blind_forwards": "forwards whose attention or position calls could not all be seen",
    "with_images": "programs with an image in a prompt",
    "trim_cut_image": "programs in which a trim left a part of an image",
    "chunk_cut_image": "programs in which a forward began inside an image",
    "chunk_behind_image": "programs that chunked behind an image",
    "rolled_back_into_image": "programs that rolled back into an image",
    "chunk_after_cut_image": "programs that chunked with a part of an image left by a trim",
    "with_videos": "programs with a video in a prompt",
    "verified_in_part": "programs with a verify round that accepted some drafts and not all",
    "restored_after_trim": "programs that restored a snapshot behind a trim",
    "forked_and_used_both": "programs that forked a sequence and went on with both",
    "saved_after_trim": "programs that saved and loaded a trimmed cache",
    "reset_and_reused": "programs that reset a sequence and used it again",
    "batched": "programs with a forward of several sequences at once",
    "batched_as_kv_heads": "programs with a batch of as many rows as KV heads",
    "batched_unlike_kv_heads": "programs with a batch of another number of rows than KV heads",
    "batched_with_padding": "programs with padding in a batch",
    "batched_after_trim": "programs with a trimmed sequence in a batch",
    "left_a_batch": "programs in which a sequence left a batch",
    "batched_four_rows": "programs with a batch of four rows or more",
}

MISSED: dict[str, str] = {
    "trimmed": "No program trimmed the front of a cache.",
    "trimmed_keeping_sinks": "No program trimmed behind kept sinks.",
    "trimmed_to_zero": "No program trimmed a cache down to nothing.",
    "rolled_back": "No program rolled back.",
    "chunk_after_trim": "No program chunked after a trim: the step at which this class of bugs shows.",
    "decode_after_trim": "No program decoded after a trim.",
    "crossed_256_slots": "In no program did a cache grow past 256 slots.",
    "crossed_512_slots": "In no program did a cache grow past 512 slots.",
    "passed_position_1024": "No program had a position above 1,024.",
    "batched_four_rows": "No program had a batch of four rows or more.",
    "several_sequences": "No program had several sequences.",
    "model_owned": "No program had a model-owned sequence.",
    "with_images": "No program had an image in a prompt.",
    "trim_cut_image": "No trim left a part of an image.",
    "chunk_cut_image": "No forward began inside an image.",
    "chunk_behind_image": "No program chunked behind an image.",
    "rolled_back_into_image": "No program rolled back into an image.",
    "chunk_after_cut_image": "No program chunked while a trim had left a part of an image.",
    "with_videos": "No program had a video in a prompt.",
    "verified_in_part": "No verify round accepted some drafts and not all.",
    "restored_after_trim": "No program restored a snapshot behind a trim.",
    "forked_and_used_both": "No program forked a sequence and went on with both.",
    "saved_after_trim": "No program saved and loaded a trimmed cache.",
    "reset_and_reused": "No program reset a sequence and used it again.",
    "batched": "No forward extended several sequences at once.",
    "batched_as_kv_heads": "No batch had as many rows as KV heads, so that a mix-up of the two could raise an error.",
    "batched_unlike_kv_heads": "No batch had another number of rows than KV heads.",
    "batched_with_padding": "No batch had padding.",
    "batched_after_trim": "No batch held a trimmed sequence.",
    "left_a_batch": "No sequence left a batch.",
}
"""What a count of 0 means, for the states that one would want reached."""

WITH_IMAGES = IMAGE_STATES
"""States of the path with images only."""


def rows(coverage: Mapping[str, int], path: str) -> list[tuple[str, str]]:
    """(words, count), in the order of the counters, as far as the path can reach them. One without words is shown by
    its name."""
    return [
        (REACHED.get(key, key.replace("_", " ")), f"{value:,}")
        for key, value in coverage.items()
        if path == "images" or key not in WITH_IMAGES
    ]


def gaps(coverage: Mapping[str, int], path: str) -> Iterator[str]:
    """One sentence for every state that was not reached or not seen."""
    if not coverage["programs"]:
        yield "No program ran."
        return
    for key, sentence in MISSED.items():
        if coverage.get(key) == 0 and (path == "images" or key not in WITH_IMAGES):
            yield sentence
    if blind := coverage.get("blind_forwards", 0):
        yield (
            f"Of {coverage['forwards']:,} forwards, {blind:,} hid attention or position calls from the "
            "probe; of what was hidden nothing was judged."
        )
    if stopped := coverage.get("stopped_by_error", 0):
        programs = coverage["programs"]
        yield f"Of {programs:,} programs, {stopped:,} broke off at an error; what lay behind it was not run."
