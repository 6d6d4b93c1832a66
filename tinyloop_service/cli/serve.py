"""`tinyloop serve`: a server in the foreground."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import structlog

from tinyloop_service.cli.options import read_settings, settings_options

if TYPE_CHECKING:
    from tinyloop_service.app import App


@click.command()
@settings_options(
    "model",
    "listen",
    "health_listen",
    "grpc_processes",
    "metrics_listen",
    "engine",
    "threads",
    "kv_memory",
    "cache_mode",
    "accuracy_level",
    "registry",
    "prefixes",
    "snapshot_dir",
    "max_prefixes",
    "max_queue",
    "drain_grace_s",
    "tokens_file",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "reflection",
    "insecure_any_address",
    "otlp_endpoint",
    "slow_request_s",
    "log_level",
    "log_format",
)
def serve(**given: str | bool | None) -> None:
    """Serve a model over gRPC until SIGTERM or Ctrl-C; then running requests finish, and the status is 0.

    Prints one line on standard output once it serves, with the address; logs go to standard error.  A second signal
    does not wait for running requests.  Every setting can be an environment variable too: TINYLOOP_KV_MEMORY=2GiB.

    \b
    Examples:
      tinyloop serve                                       # the demo model
      tinyloop serve --model 407m.tinyloop --listen 127.0.0.1:50051 --kv-memory 2GiB
      tinyloop serve --listen 127.0.0.1:0 --health-listen none
    """
    from tinyloop_service.app import App, run_process
    from tinyloop_service.demo import MODEL_PATH
    from tinyloop_service.loading import load_model
    from tinyloop_service.observe.logs import configure_logging

    settings = read_settings(given)
    configure_logging(settings.server)
    model = settings.server.model or MODEL_PATH
    app = App(settings, lambda: load_model(model, settings.engine, progress=_report))
    run_process(app, on_ready=_announce)


def _report(step: str) -> None:
    structlog.get_logger("tinyloop.cli").info("loading", step=step)


def _announce(app: App) -> None:
    """The line that scripts wait for: serving ADDRESS [health ADDRESS] [metrics ADDRESS].  Nobody waits for them."""
    from tinyloop_service.observe.lines import Lines

    health = f" health {app.health_address}" if app.health_address else ""
    metrics = f" metrics {app.metrics_address}" if app.metrics_address else ""
    if sys.stdout is not None:
        Lines(1).write(f"serving {app.address}{health}{metrics}\n")
