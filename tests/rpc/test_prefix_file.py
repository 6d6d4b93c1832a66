"""`--prefixes FILE`: what is in it is built and pinned before the server is ready, or the server says why not."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from rpc_harness import BOS, CONFIG, SERVER, Served, byte_tokenizer, expected_tokens, serving

from tinyloop_service.app import App
from tinyloop_service.client import AsyncClient
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.errors import InvalidArgument, PrefixNotFound, Unavailable
from tinyloop_service.loading import LoadedModel
from tinyloop_service.registry.prefix_file import read_prefixes
from tinyloop_service.settings import NamesSettings, Settings
from tinyloop_service.types import PrefixState

TOML = """
[[prefix]]
id = "base"
text = "hello"
loops = 3

[[prefix]]
id = "assistant"
file = "assistant.txt"
parent = "base"

[[prefix]]
id = "plain"
tokens = [5, 6, 7]
cache_window = 64
"""


def ids_of(text: str) -> tuple[int, ...]:
    return byte_tokenizer().encode(text, bos=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "assistant.txt").write_text(" there")
    path = tmp_path / "prefixes.toml"
    path.write_text(TOML)
    return path


async def answer(client: AsyncClient, prefix: str) -> tuple[int, ...]:
    completion = await client.complete(prefix=prefix, suffix=(7,), max_tokens=5, ignore_eos=True)
    return tuple(completion.token_ids)


async def test_names_of_the_file_are_built_and_pinned(file: Path) -> None:
    names = NamesSettings(prefixes=str(file))
    async with serving(names=names, tokenizer=byte_tokenizer()) as served, served.client() as client:
        found = {info.id: info for info in await client.list_prefixes()}
        assert found.keys() == {"assistant", "base", "plain"}
        assert all(info.pinned and info.state is PrefixState.READY for info in found.values())
        assert (found["assistant"].parent, found["assistant"].loops, found["plain"].cache_window) == ("base", 3, 64)
        prompt = (BOS, *ids_of("hello"), *ids_of(" there"))
        assert await answer(client, "assistant") == expected_tokens((*prompt, 7), 5, 3)
        assert served.engine.tokens_prefilled == len(prompt) + 3 + 1


async def test_the_server_is_not_ready_before_they_are_built(file: Path) -> None:
    gate = threading.Event()
    settings = Settings(server=SERVER, names=NamesSettings(prefixes=str(file)))
    app = App(settings, lambda: LoadedModel(FakeEngine(gate=gate), byte_tokenizer(), CONFIG))
    await app.start()
    ready = asyncio.create_task(app.ready())
    async with AsyncClient(app.address) as client:
        with pytest.raises(Unavailable, match="loading"):
            await client.delete_prefix("base")  # not retried by the client
        assert not ready.done()
        gate.set()
        await ready
        assert (await client.get_prefix("plain")).state is PrefixState.READY
    await app.stop(grace_s=0.0)


async def test_the_same_as_json(file: Path) -> None:
    path = file.with_suffix(".json")
    entries = [
        {"id": "base", "text": "hello", "loops": 3},
        {"id": "assistant", "file": "assistant.txt", "parent": "base"},
        {"id": "plain", "tokens": [5, 6, 7], "cache_window": 64},
    ]
    path.write_text(json.dumps({"prefix": entries}))
    assert read_prefixes(path) == read_prefixes(file)


async def test_the_file_decides_what_a_name_stands_for(file: Path) -> None:
    names = NamesSettings(registry=f"sqlite:///{file.parent}/names.db", prefixes=str(file))

    async def uids(served: Served) -> dict[str, str]:
        async with served.client() as client:
            return {info.id: info.uid for info in await client.list_prefixes()}

    async with serving(names=names, tokenizer=byte_tokenizer()) as served:
        first = await uids(served)
        async with served.client() as client:
            await client.update_prefix("plain", pinned=False, ttl=1000)
    async with serving(names=names, tokenizer=byte_tokenizer()) as served:
        assert await uids(served) == first, "the same content is the same prefix"
        async with served.client() as client:
            plain = await client.get_prefix("plain")
            assert plain.pinned and plain.expire_time is None
    changed = TOML.replace("hello", "good day").replace('id = "plain"', 'id = "other"')
    await asyncio.to_thread(file.write_text, changed)
    async with serving(names=names, tokenizer=byte_tokenizer()) as served, served.client() as client:
        now = await uids(served)
        assert now.keys() == {"assistant", "base", "other", "plain"}, "what the file does not name any more stays"
        assert now["plain"] == first["plain"]
        assert now["base"] != first["base"] and now["assistant"] != first["assistant"]
        prompt = (BOS, *ids_of("good day"), *ids_of(" there"))
        assert await answer(client, "assistant") == expected_tokens((*prompt, 7), 5, 3)


@pytest.fixture
def tenant_s_file(tmp_path: Path) -> Path:
    path = tmp_path / "prefixes.toml"
    path.write_text('[[prefix]]\nid = "p"\ntokens = [1]\ntenant = "acme"\n')
    return path


async def test_a_tenant_s_names_are_its_own(tenant_s_file: Path) -> None:
    async with serving(names=NamesSettings(prefixes=str(tenant_s_file))) as served, served.client() as client:
        assert served.scheduler.get_prefix("p", tenant="acme").pinned
        with pytest.raises(PrefixNotFound):
            await client.get_prefix("p")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[[prefix", "is no TOML"),
        pytest.param("prefix = " + "[" * 10_000, "is no TOML", id="deep"),
        pytest.param("prefix = " + "9" * 10_000, "is no TOML", id="long number"),
        ("", r"\[\[prefix\]\] tables expected"),
        ("prefix = 3", r"\[\[prefix\]\] tables expected"),
        ("prefix = [3]", "entry 1 is no table"),
        ('[[prefix]]\nid = "a"\ntext = "x"\n[more]\n', "'more' at the top"),
        ('[[prefix]]\ntext = "x"', "entry 1: id: is None"),
        ('[[prefix]]\nid = "A B"\ntext = "x"', "id: is 'A B'"),
        ('[[prefix]]\nid = "a"', "'a' has no content"),
        ('[[prefix]]\nid = "a"\ntext = "x"\ntokens = [1]', "'a' has text and tokens"),
        ('[[prefix]]\nid = "a"\ntext = ""', "'a': text: is empty"),
        ('[[prefix]]\nid = "a"\ntext = 5', "'a': text: is 5"),
        ('[[prefix]]\nid = "a"\ntokens = ["x"]', r"'a': tokens\[0\]"),
        ('[[prefix]]\nid = "a"\ntokens = [-1]', r"'a': tokens\[0\]: is -1"),
        ('[[prefix]]\nid = "a"\nfile = "missing.txt"', "'a': file: missing.txt cannot be read: No such file"),
        ('[[prefix]]\nid = "a"\ntext = "x"\nloop = 3', "'a' has 'loop'; expected are id, text"),
        ('[[prefix]]\nid = "a"\ntext = "x"\nloops = 0', "'a': loops: is 0"),
        ('[[prefix]]\nid = "a"\ntext = "x"\ntenant = "a\\u0000"', "'a': tenant: holds control characters"),
        ('[[prefix]]\nid = "a"\ntext = "x"\n' * 2, "names 'a' twice"),
    ],
)
def test_a_file_that_cannot_be_understood_is_named_with_the_entry(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "prefixes.toml"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=said) as caught:
        read_prefixes(path)
    assert caught.value.field == "prefixes" and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('id = "a"\ntokens = [1]\nparent = "nobody"', "'a' cannot be built: no prefix 'nobody'"),
        ('id = "a"\ntokens = [1]\nloops = 99', "'a' cannot be built: loops: 99"),
        ('id = "a"\ntokens = [100000]', "'a' cannot be built: input: token id 100000"),
        ('id = "a"\ntext = "x"', "'a' cannot be built: text: the model file has no tokenizer"),
    ],
)
async def test_a_prefix_that_cannot_be_built_ends_the_start(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "prefixes.toml"
    path.write_text(f"[[prefix]]\n{content}\n")
    with pytest.raises(InvalidArgument, match=said):
        async with serving(names=NamesSettings(prefixes=str(path))):
            pass


async def test_a_missing_file_ends_the_start_before_anything_is_loaded() -> None:
    def load() -> LoadedModel:
        raise AssertionError("the model was loaded first")

    with pytest.raises(FileNotFoundError):
        await App(Settings(server=SERVER, names=NamesSettings(prefixes="/no/such/file.toml")), load).start()
