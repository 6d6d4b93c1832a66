"""The engine in this process as the target of a load test: what a server would serve, with no gRPC between.

Scheduler and harness share one event loop: its lateness is of both, and no verdict on the harness.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

from tinyloop_service.bench import InProcess
from tinyloop_service.client import ModelInfo
from tinyloop_service.loading import LoadedModel, load_model
from tinyloop_service.scheduler.loop import Scheduler
from tinyloop_service.settings import Settings


class Local(InProcess):
    """Made by `opened`; closes its engine when the context is left."""

    def __init__(self, loaded: LoadedModel, settings: Settings) -> None:
        self._loaded = loaded
        self._own = Scheduler(loaded.engine, settings.scheduler, tokenizer=loaded.tokenizer)
        super().__init__(self._own)

    @classmethod
    async def opened(cls, path: Path, settings: Settings) -> Self:
        """Raises what `load_model` raises."""
        return cls(await asyncio.to_thread(load_model, path, settings.engine), settings)

    async def model(self) -> ModelInfo:
        limits, tokenizer = self._own.limits, self._own.tokenizer
        return ModelInfo(
            model_id=limits.model_id,
            engine=self._own.engine_name,
            server_version="",
            replica="",
            default_loops=limits.default_loops,
            max_loops=limits.max_loops,
            max_seq_len=limits.max_seq_len,
            max_rows=limits.max_rows,
            cache_mode=limits.cache_mode,
            has_tokenizer=tokenizer is not None,
            eos_token_ids=limits.eos_token_ids,
            config=dict(self._loaded.config),
        )

    async def tokenize(self, text: str, *, bos: bool) -> list[int]:
        assert self._own.tokenizer is not None
        return list(self._own.tokenizer.encode(text, bos=bos))

    async def __aenter__(self) -> Self:
        await self._own.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._own.close()
