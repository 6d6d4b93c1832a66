"""Watching a server: metrics for Prometheus, one log line a call, traces.  `hub` is what `app` wires in."""
