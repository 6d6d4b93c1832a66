"""One of the moments of `tests/kill_nine.py`, and that its ledger sees what it is there to see."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from kill_nine import MOST_TOKENS, Trial, trial
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


async def test_children_of_children_fit_into_what_a_model_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def created(request: p.CreatePrefixRequest) -> p.Prefix:
        return p.Prefix(etag=request.prefix_id)

    rng, names = random.Random(1), [Name(f"n{i}") for i in range(60)]
    monkeypatch.setattr(rng, "random", lambda: 0.0)  # whatever may have a parent has one
    made = Trial([], None, rng)
    for number, name in enumerate(names):
        await made._create(name, names[:number], rng, SimpleNamespace(CreatePrefix=created))  # type: ignore[arg-type]
    longest = max(len(tokens) for name in names for tokens in name.contents)
    assert MOST_TOKENS - 300 < longest <= MOST_TOKENS


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
