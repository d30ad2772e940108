"""What a fake target can be told to do wrong, and what it can do otherwise without harm."""

from __future__ import annotations

from typing import Literal

Bug = Literal[
    "attention a little off",
    "mask leaks",  # shows the token after each
    "mask hides itself",
    "mask one row short",
    "a query too many",
    "window one too wide",
    "window counted in slots",
    "no window",
    "no window for one token",
    "keys one short after rollback",
    "values one short after a trim",
    "cache says offset for live_len",
    "neighbour trimmed too",
    "positions from live_len",
    "reports zero removed",
    "trims what the model owns",
    "visits one cache",
    "raises after a trim to zero",
    "noise",  # logits differ from call to call
    "noise in two logits",
    "bias under the live policy",
    "nan logits under the live policy",
    "nan logits after a trim",
    "inf logits after a trim",
    "logits of the last token only",
    "logits without the oldest row after a trim",
    "logits without the newest row after a rollback",
    "logits a little off after a trim",  # by a hundredth
    "raises without a cache",
    "rows change in a trim",
    "rows of the neighbour change in a trim",
    "snapshot shares its rows",
    "restore keeps the offset",
    "fork shares its rows",
    "fork leaves out a row",
    "forgets live_start in a file",
    "slots grow in a file",
    "reset keeps the offset",
    "reset keeps its memory",
    "trims keep their memory",
    "allocates far ahead",
    "a rollback adds slots",
    "overwritten snapshots stay",
    "what is reset stays",
    "a rollback leaves one",
    "the cut matters",  # a logit counts the tokens of the forward
    "copies what the model owns",
    "copies raise",
    "writes into its tokens",
    "a trim writes into keys given out",
    "arguments grow",
    "quantises too coarsely",
    "quantises what does not fit",
    "refuses to quantise",
    "a refused quantisation trims",
    "slots stay as large when quantised",
]
Quirk = Literal[  # harmless, or hiding
    "hides a call",
    "hides a call after a trim",
    "encoder call",
    "batch and head axes",
    "one row for all queries when all are visible",
    "hides positions after a trim",
    "mask for one token",
    "scores for one token",  # added to, hiding nothing: what an MLA decode hands over
    "queries of the last token only",
    "attention by hand",
    "quantised attention by hand",
    "no mask under the offset policy",
    "a table instead of positions",
    "a table beside the positions",
    "a single number as position",
    "experts nearly tie",  # every choice of the witness could go the other way
    "rows nearly round to others",  # the same of an Int8 cache
    "gives nothing to watch",
]
