"""How well models predict a text: bits per byte and agreement at several depths, and how errors grow over the loops.

In: model files' weights, texts, `Options`.  Out: a frozen `Report`, as tables, as JSON, as a plot.  It refuses to know
about engines: every row is the same float32 NumPy forward with one thing changed, the weights in the file, the rounding
of activations, what a cache mode stores, or that and how it is attended; so a row says what that one thing costs.

    windows    a text as windows of tokens             score    nats → bits per byte, agreement, distance of states
    rounding   a model with one rounding, per window   run      which rows there are; every window through every row
    report     tables and JSON                         plot     the picture (matplotlib, the extra `plot`)
"""

from tinyloop_service.evaluate.run import WINDOW_TOKENS, NamedModel, Options, Report, Row, evaluate
from tinyloop_service.evaluate.windows import NamedText

__all__ = ["WINDOW_TOKENS", "NamedModel", "NamedText", "Options", "Report", "Row", "evaluate"]
