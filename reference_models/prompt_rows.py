"""What a forward over a ragged batch takes from the prompts of its rows, each at its own place in its own prompt."""

from collections.abc import Sequence

import mlx.core as mx

from reference_models import rope
from reference_models.engine.batch_rows import BatchLengths
from reference_models.prompt import Prompt

Prompts = Prompt | Sequence[Prompt | None] | None
"""One for each row of a batch, None for a row of text; a single prompt is that of the only row, None that of none."""


def lay_over(
    rows: BatchLengths, given: Prompts, tokens: mx.array, embeddings: mx.array
) -> tuple[mx.array, mx.array, tuple[mx.array, ...]]:
    """A chunk ``tokens [B, L]`` with what the prompts of the rows know of it.

    Args:
        rows: the cache that the chunk will be appended to; its padding at the right is text, whatever the prompt says.
        given: the prompts.
        tokens: int ``[B, L]``.
        embeddings: ``[B, L, hidden]``, those of text.

    Returns:
        ``(embeddings, position_ids, deepstack)``: ``[B, L, hidden]``, int32 ``[3, B, L]``, and ``[B, L, hidden]`` for
        each of as many layers as the prompt with the most has; row by row as ``Prompt.lay_over`` gives them.

    Raises:
        ValueError: not one prompt for each row; tokens that are not those of the prompt, by the number of the row.
    """
    batch, length = tokens.shape
    prompts = _one_each(given, batch)
    delta = mx.array([[prompt.rope_delta if prompt else 0] for prompt in prompts], dtype=mx.int32)
    position_ids = rope.text_position_ids(rows.offset, delta, batch, length)
    if not any(prompts):
        return embeddings, position_ids, ()
    real = rows.prepared or (length,) * batch
    laid: list[tuple[mx.array, mx.array, tuple[mx.array, ...]]] = []
    for row, (prompt, offset, n) in enumerate(zip(prompts, rows.offsets, real, strict=True)):
        mine = slice(row, row + 1)
        x, ids = embeddings[mine], position_ids[:, mine]
        if prompt is None or n == 0:
            laid.append((x, ids, ()))
            continue
        try:
            seen, places, added = prompt.lay_over(offset, tokens[mine, :n], x[:, :n], ids[..., :n])
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from None
        behind = x[:, n:]
        laid.append(
            (
                mx.concatenate([seen, behind], axis=1),
                mx.concatenate([places, ids[..., n:]], axis=-1),
                tuple(mx.concatenate([layer, mx.zeros_like(behind)], axis=1) for layer in added),
            )
        )
    depth = max(len(added) for _, _, added in laid)
    nothing = mx.zeros_like(embeddings[:1])
    deepstack = tuple(
        mx.concatenate([added[layer] if layer < len(added) else nothing for _, _, added in laid])
        for layer in range(depth)
    )
    return (
        mx.concatenate([x for x, _, _ in laid]),
        mx.concatenate([ids for _, ids, _ in laid], axis=1),
        deepstack,
    )


def _one_each(given: Prompts, batch: int) -> tuple[Prompt | None, ...]:
    if given is None:
        return (None,) * batch
    prompts = (given,) if isinstance(given, Prompt) else tuple(given)
    if len(prompts) != batch:
        raise ValueError(f"a prompt belongs to one sequence: {len(prompts)} given for a batch of {batch} rows")
    return prompts
