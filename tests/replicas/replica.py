"""A replica with the fake engine.  Argument: seconds a step takes.  All else as `tinyloop serve` has it, TINYLOOP_*.

Prints "serving ADDRESS" when it is ready.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).parents[1] / "rpc"))

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
    app = App(settings, lambda: LoadedModel(engine, None, CONFIG))
    run_process(app, lambda app: print("serving", app.address, flush=True))


if __name__ == "__main__":
    main()
