"""HTML that cannot be broken by what it quotes: text is escaped unless a `tag` made it."""

from __future__ import annotations

from html import escape


class Markup(str):
    """Is HTML already."""

    __slots__ = ()


def tag(name: str, *content: str, **attributes: str) -> Markup:
    """<name attributes>content</name>; `class_` is class, `_` in other names is `-`."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: str) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in content))
