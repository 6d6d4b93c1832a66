"""A server process with the fake engine, for tests of signals and kills.  Arguments: step and load time in seconds.

Settings come from the environment, as those of `tinyloop serve`.  Prints "listening" when signals are heard, and
"serving ADDRESS health ADDRESS" when it is ready.
"""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

from rpc_harness import CONFIG

from tinyloop_service.app import App, run_process
from tinyloop_service.engine.fake import FakeEngine
from tinyloop_service.loading import LoadedModel
from tinyloop_service.observe.logs import configure_logging
from tinyloop_service.settings import Settings


def main() -> NoReturn:
    settings = Settings.from_environment(os.environ)
    configure_logging(settings.server)
    engine = FakeEngine(step_s=float(sys.argv[1]))

    def load() -> LoadedModel:
        print("listening", flush=True)
        time.sleep(float(sys.argv[2]))
        return LoadedModel(engine, None, CONFIG)

    def announce(app: App) -> None:
        print("serving", app.address, "health", app.health_address, flush=True)

    run_process(App(settings, load), announce)


if __name__ == "__main__":
    main()
