"""What `tinyloop top` shows: two samples of a server to one frame.

In: samples, and what the person chose.  Out: something rich can draw, as wide as it is told.  It refuses to ask servers
and to read keys.

Formulas: a rate is the difference of two samples' totals over the time between them; "from prefixes" is cached / prompt
tokens, both since the sample before, or since the server's start while nothing was admitted in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tinyloop_service.cli.output import human_bytes
from tinyloop_service.client import Prefix
from tinyloop_service.client.results import ModelInfo
from tinyloop_service.types import Load, PrefixState

ORDERS = ("size", "use", "name")
BAR = 30  # cells
LABEL = 11
_SPARKS = " ▁▂▃▄▅▆▇█"
_STYLES = {"prefixes": "green", "requests": "cyan", "active": "magenta", "free": "bright_black"}
_STATE_STYLES = {"ready": "green", "building": "yellow", "evicted": "dim", "failed": "red"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A server at one moment; `time_s` by any clock that goes on steadily."""

    time_s: float
    load: Load
    prefixes: Sequence[Prefix]


@dataclass(frozen=True, slots=True)
class Frame:
    """All that is shown."""

    target: str
    model: ModelInfo | None  # None: it was not reached yet
    now: Sample | None
    before: Sample | None
    history: Sequence[float] = field(default_factory=tuple)  # generated tokens a second, oldest first
    trouble: str = ""  # why there is no newer sample
    order: str = ORDERS[0]
    rows: int | None = None  # prefixes to show; None: all
    keys: str = ""  # what may be typed

    def rate(self, total: str) -> float | None:
        """Of a counter of Load, a second; None without two samples."""
        if self.now is None or self.before is None or self.now.time_s <= self.before.time_s:
            return None
        gained: int = getattr(self.now.load, total) - getattr(self.before.load, total)
        return max(0, gained) / (self.now.time_s - self.before.time_s)  # a server that was started anew begins at 0


def render(frame: Frame) -> RenderableType:
    """Header, gauges, prefixes."""
    parts: list[RenderableType] = [_header(frame), Text()]
    if frame.now is not None:
        parts += [_gauges(frame, frame.now.load), Text(), _prefixes(frame, frame.now)]
    if frame.keys:
        parts += [Text(), Text(frame.keys, style="dim")]
    return Group(*parts)


def _header(frame: Frame) -> Text:
    head = Text.assemble(("tinyloop top", "bold"), "  ", frame.target, no_wrap=True, overflow="ellipsis")
    if (model := frame.model) is not None:
        facts = f"{model.engine} {model.cache_mode.value}, {model.default_loops} loops, model {model.model_id[:8]}"
        head.append(f"  {model.replica}  {facts}", style="dim")
    if frame.trouble:
        head.append(f"  {frame.trouble}", style="bold red")
    elif frame.now is not None and not frame.now.load.accepting:
        head.append("  takes no new requests", style="bold yellow")
    return head


def _gauges(frame: Frame, load: Load) -> Group:
    max_rows = frame.model.max_rows if frame.model is not None else 0
    held = (("prefixes", load.pages_prefixes), ("requests", load.pages_requests), ("active", load.pages_active))
    taken, capacity = load.pages_total - load.pages_free, human_bytes(load.pages_total * load.page_bytes)
    waiting = Text(f"{load.requests_waiting} waiting", style="bold yellow" if load.requests_waiting else "")
    return Group(
        _line("rows", _bar([("requests", load.rows_running)], max_rows), f"{load.rows_running} of {max_rows}"),
        _line("requests", Text.assemble(f"{load.requests_running} running, ", waiting)),
        _line("memory", _bar(held, load.pages_total), f"{taken / max(1, load.pages_total):.0%} of {capacity}"),
        _line("", _legend((*held, ("free", load.pages_free)), load.page_bytes)),
        _line("generated", Text(_spark(frame.history), style="cyan"), _per_second(frame.rate("generated_tokens"))),
        _line("prompts", _reuse(frame, load), _per_second(frame.rate("prompt_tokens"))),
    )


def _line(label: str, shown: Text, value: str = "") -> Text:
    gap = " " * max(2, BAR + 2 - shown.cell_len) if value else ""
    line = Text.assemble((label.ljust(LABEL), "bold"), shown, gap, value)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _bar(parts: Sequence[tuple[str, int]], total: int) -> Text:
    """Cells by share of the total, at least one for what is not nothing."""
    bar, left = Text(), BAR
    for name, count in parts:
        cells = min(left, max(1, round(BAR * count / total))) if count and total else 0
        bar.append("█" * cells, style=_STYLES[name])
        left -= cells
    bar.append("░" * left, style=_STYLES["free"])
    return bar


def _legend(parts: Sequence[tuple[str, int]], page_bytes: int) -> Text:
    """The colours of the memory's bar, and their sizes."""
    shown = (Text(f"{name} {human_bytes(count * page_bytes)}", style=_STYLES[name]) for name, count in parts)
    return Text("  ").join(shown)


def _spark(history: Sequence[float]) -> str:
    """The last rates as a line of blocks, the highest of them full."""
    shown = list(history)[-BAR:]
    top = max(shown, default=0.0)
    steps = len(_SPARKS) - 1
    blocks = (
        [_SPARKS[max(1, round(steps * rate / top)) if rate else 0] for rate in shown] if top else [" "] * len(shown)
    )
    return "".join(blocks).rjust(BAR)


def _per_second(rate: float | None) -> str:
    if rate is None:
        return "– tokens/s"
    return f"{rate:,.0f} tokens/s" if rate >= 10 or not rate else f"{rate:.1f} tokens/s"


def _reuse(frame: Frame, load: Load) -> Text:
    """How much of the prompts came from prefixes, lately or else since the start."""
    prompts, cached = frame.rate("prompt_tokens"), frame.rate("cached_tokens")
    if prompts and cached is not None:
        return Text(f"{cached / prompts:.0%} from prefixes")
    if load.prompt_tokens:
        return Text(f"{load.cached_tokens / load.prompt_tokens:.0%} from prefixes since start", style="dim")
    return Text("none since the start", style="dim")


def _prefixes(frame: Frame, now: Sample) -> Group:
    chosen = _ordered(now.prefixes, frame.order)
    if not chosen:
        return Group(_counts(now.load), Text(_nameless(now.load), style="dim"))
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column(f"NAME, by {frame.order}", overflow="ellipsis", no_wrap=True, ratio=1, min_width=12)
    table.add_column("STATE", no_wrap=True)
    for column in ("TOKENS", "LOOPS", "SIZE", "USED", "USES/S"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("LAST USE", "EXPIRES"):
        table.add_column(column, no_wrap=True)
    uses = {prefix.uid: prefix.use_count for prefix in frame.before.prefixes} if frame.before is not None else {}
    span_s = now.time_s - frame.before.time_s if frame.before is not None else 0.0
    shown = chosen[: frame.rows]
    for prefix in shown:
        table.add_row(*_row(prefix, uses.get(prefix.uid), span_s))
    more = [Text(f"and {len(chosen) - len(shown)} more", style="dim")] if len(shown) < len(chosen) else []
    return Group(_counts(now.load), table, *more)


def _nameless(load: Load) -> str:
    """Instead of a table without rows; who sees the whole server's load sees its own names only."""
    if load.prefixes_ready or load.prefixes_building or load.prefixes_evicted or load.prefixes_failed:
        return "no names of yours; what is counted is other tenants', or has lost its name"
    return "no names; make one with: tinyloop prefix create NAME TEXT"


def _counts(load: Load) -> Text:
    """Prefixes by state, nameless ones included."""
    counts = [("ready", load.prefixes_ready), ("building", load.prefixes_building), ("evicted", load.prefixes_evicted)]
    counts += [("failed", load.prefixes_failed)] if load.prefixes_failed else []
    line = Text("prefixes".ljust(LABEL), style="bold", no_wrap=True, overflow="ellipsis")
    for state, count in counts:
        line.append(f"{count} {state}  ", style=f"not bold {_STATE_STYLES[state]}" if count else "not bold dim")
    if load.prefix_evictions:
        line.append(f"{load.prefix_evictions} evictions since the start", style="not bold dim")
    return line


def _ordered(prefixes: Sequence[Prefix], order: str) -> list[Prefix]:
    """Largest, most used or first first; those that are equal by name."""
    measure = {"size": lambda p: p.size_bytes, "use": lambda p: p.use_count}.get(order)
    by_name = sorted(prefixes, key=lambda prefix: prefix.id)
    return by_name if measure is None else sorted(by_name, key=measure, reverse=True)


def _row(prefix: Prefix, used_before: int | None, span_s: float) -> list[Text]:
    name = Text(prefix.id)
    if prefix.pinned:
        name.append(" pinned", style="dim")
    state = prefix.state.value
    if prefix.state is PrefixState.BUILDING and prefix.token_count:
        state += f" {prefix.tokens_built / prefix.token_count:.0%}"
    lately = (prefix.use_count - used_before) / span_s if used_before is not None and span_s > 0 else 0.0
    return [
        name,
        Text(state, style=_STATE_STYLES[prefix.state.value]),
        Text(f"{prefix.token_count:,}"),
        Text(str(prefix.loops)),
        Text(human_bytes(prefix.size_bytes) if prefix.size_bytes else "–"),
        Text(f"{prefix.use_count:,}"),
        Text(f"{lately:.1f}" if lately else "–", style="cyan" if lately else "dim"),
        Text(_distance(prefix.last_use_time, " ago") if prefix.use_count else "–"),
        Text(_distance(prefix.expire_time, "", "in ")),
    ]


def _distance(moment: datetime | None, after: str, before: str = "") -> str:
    """How far a moment is from now, in its largest unit."""
    if moment is None:
        return "never"
    seconds = abs((moment - datetime.now(UTC)).total_seconds())
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= length:
            return f"{before}{seconds / length:.0f} {unit}{after}"
    return "now"
