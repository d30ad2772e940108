"""What a worker must refuse in words, and go on: requests that no harness sends. And that it leaves with its input."""

from __future__ import annotations

import time
from collections.abc import Iterator

from harness.wire.codec import CodecError, encode
from harness.wire.process import WorkerError, WorkerProcess
from harness.wire.protocol import VERSION, line_of, message_of

LEAVES_IN = 5.0  # seconds in which a worker whose input ends has to be gone


def refusals(command: str, limit: float, policy: str) -> Iterator[tuple[str, str]]:
    """(name, what is wrong or nothing) of the checks that say what no harness would."""
    open_one = {"do": "open", "owners": ["pool"], "policy": policy, "attention": False, "arguments": False}
    requests: tuple[tuple[str, bytes], ...] = (
        ("a version that there is not is refused", line_of({"id": 1, "do": "hello", "protocol": VERSION + 1000})),
        ("a message that there is not is refused", line_of({"id": 2, "do": "fly"})),
        ("a line that is no JSON is refused", b"fly"),
        ("an operation without a session is refused", line_of({"id": 4, "do": "tell"})),
        ("a token outside of the vocabulary is refused", _forward_of(5, [2**31])),
        ("a sequence that there is not is refused", _forward_of(6, [1], sequence=99)),
        ("a field that is missing is refused", line_of({"id": 7, "do": "forward", "sequence": 0})),
    )
    worker = WorkerProcess(command, limit)
    try:
        for number, (name, request) in enumerate(requests, 1):
            if number == 5:
                worker.exchange(line_of({"id": 0, **open_one}))
            try:
                answer = message_of(worker.exchange(request))
            except (CodecError, WorkerError) as error:
                yield name, str(error)
                return
            wrong = "" if isinstance(answer.get("bad_request"), str) else "the answer has no text 'bad_request'"
            if request != b"fly" and answer["id"] != number:
                wrong = f"the answer has the id {answer['id']}, asked was {number}"
            yield name, wrong
        started = time.monotonic()
        worker.stop(LEAVES_IN)
        late = time.monotonic() - started > LEAVES_IN - 0.5
        yield "it ends when its input ends", f"not within {LEAVES_IN:g} s" if late else ""
    finally:
        worker.stop()


def _forward_of(number: int, tokens: list[int], sequence: int = 0) -> bytes:
    return line_of({"id": number, "do": "forward", "sequence": sequence, "tokens": encode(tokens)})
