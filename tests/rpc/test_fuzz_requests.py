"""Some of the requests of `tests/fuzz_requests.py`, and that it sees what it is there to see."""

from __future__ import annotations

import pytest
from fuzz_requests import Call, fuzz, fuzzing
from rpc_harness import ids
from wire_values import METHODS

from tinyloop_service.pb import generation_pb2 as g

INPUTS = 300  # the command sends 100 000


def test_no_request_ends_as_none_may() -> None:
    outcomes = fuzz(INPUTS, 0)
    assert outcomes.total() == INPUTS
    served = {method for (method, outcome), count in outcomes.items() if outcome == "OK" and count}
    assert {"Generate", "GenerateUnary"} & served, "they go deep now and then"


async def test_what_must_not_be_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    unary = next(method for method in METHODS if method.path.endswith("GenerateUnary"))
    request = g.GenerateUnaryRequest(generation=g.GenerateRequest(input=ids(1), max_tokens=0))
    call = Call(unary, request.SerializeToString(), None, None)
    async with fuzzing() as fuzzer:
        await fuzzer.send([call])
        assert fuzzer.outcomes == {("GenerateUnary", "INVALID_ARGUMENT"): 1}
        monkeypatch.setattr("tinyloop_service.rpc.convert.arguments.integer", lambda *args: 1 // 0)
        with pytest.raises(AssertionError, match="INTERNAL"):
            await fuzzer.send([call])
        monkeypatch.undo()
        pool = fuzzer.served.scheduler._core._sequences.pool
        pool._free_ids.pop()
        with pytest.raises(AssertionError):
            await fuzzer.send([])
