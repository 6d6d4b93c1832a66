"""A server process with a slow fake engine, for tests of signals: prints "serving ADDRESS health ADDRESS"."""

from __future__ import annotations

import asyncio
import sys

from rpc_harness import CONFIG

from tinyloop_service.app import App, LoadedModel, configure_logging
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.settings import LogFormat, ServerSettings, Settings


def main() -> int:
    server = ServerSettings(
        listen="127.0.0.1:0",
        health_listen="127.0.0.1:0",
        drain_grace_s=float(sys.argv[1]),
        log_format=LogFormat.JSON,
    )
    configure_logging(server)
    engine = FakeEngine(step_s=float(sys.argv[2]))
    app = App(Settings(server=server), lambda: LoadedModel(engine, None, CONFIG))
    return asyncio.run(app.run(lambda app: print("serving", app.address, "health", app.health_address, flush=True)))


if __name__ == "__main__":
    sys.exit(main())
