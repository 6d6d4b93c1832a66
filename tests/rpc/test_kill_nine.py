"""One of the moments of `tests/kill_nine.py`, and that its ledger sees what it is there to see."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_nine import trial
from name_ledger import Name, State
from redis_server import redis_binary
from rpc_harness import ids

from tinyloop_service.pb import prefix_pb2 as p


@pytest.mark.parametrize("registry", ["sqlite", "redis"])
async def test_no_acknowledged_name_is_lost_and_no_half_built_one_served(registry: str, tmp_path: Path) -> None:
    binary = redis_binary() if registry == "redis" else None
    async with trial(registry, tmp_path, seed=1, binary=binary) as found:
        await found.moment()
        assert not found.wrong
    assert found.counts["acknowledged"] and found.counts["verified"]


def prefix(*tokens: int, etag: str = "e") -> p.Prefix:
    return p.Prefix(etag=etag, input=ids(*tokens))


def test_the_ledger_takes_what_may_be_and_nothing_else() -> None:
    told = Name("n", {State((1, 2), "e")})
    assert "lost" in (told.verify(None) or "")
    assert "told was" in (told.verify(prefix(1, 2, etag="older")) or "")
    assert "told was" in (told.verify(prefix(1)) or "")
    assert told.verify(prefix(1, 2)) is None
    in_doubt = Name("n", {None, State((1, 2))})
    assert in_doubt.verify(prefix(1, 2, etag="any")) is None
    assert in_doubt.possible == {State((1, 2), "any")}
    assert not in_doubt.is_answer((0,))
    absent = Name("n")
    assert absent.verify(prefix(1)) and absent.verify(None) is None
