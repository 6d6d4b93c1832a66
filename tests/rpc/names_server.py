"""A server process with the fake engine and a registry, for tests that kill it.

Arguments: registry, step in seconds, directory where state is kept.
Prints "serving ADDRESS" when it is ready.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from rpc_harness import CONFIG, SERVER

from tinyloop_service.app import App, LoadedModel, run_process
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.observe.logs import configure_logging
from tinyloop_service.settings import LogLevel, NamesSettings, ServerSettings, Settings


def main() -> NoReturn:
    configure_logging(ServerSettings(log_level=LogLevel.ERROR))
    engine = FakeEngine(step_s=float(sys.argv[2]))
    settings = Settings(server=SERVER, names=NamesSettings(registry=sys.argv[1], snapshot_dir=sys.argv[3]))
    app = App(settings, lambda: LoadedModel(engine, None, CONFIG))
    run_process(app, lambda app: print("serving", app.address, flush=True))


if __name__ == "__main__":
    main()
