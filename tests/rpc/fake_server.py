"""A server process with a slow fake engine, for tests of signals.  Arguments: grace, step and load time in seconds.

Prints "listening" when signals are heard, and "serving ADDRESS health ADDRESS" when it is ready.
"""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from rpc_harness import CONFIG

from tinyloop_service.app import App, LoadedModel, run_process
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.observe.logs import configure_logging
from tinyloop_service.settings import LogFormat, ServerSettings, Settings


def main() -> NoReturn:
    server = ServerSettings(
        listen="127.0.0.1:0",
        health_listen="127.0.0.1:0",
        drain_grace_s=float(sys.argv[1]),
        log_format=LogFormat.JSON,
    )
    configure_logging(server)
    engine = FakeEngine(step_s=float(sys.argv[2]))

    def load() -> LoadedModel:
        print("listening", flush=True)
        time.sleep(float(sys.argv[3]))
        return LoadedModel(engine, None, CONFIG)

    def announce(app: App) -> None:
        print("serving", app.address, "health", app.health_address, flush=True)

    run_process(App(Settings(server=server), load), announce)


if __name__ == "__main__":
    main()
