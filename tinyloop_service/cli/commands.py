"""Groups of commands whose help shows of each command its whole first sentence, where click would cut it off."""

from __future__ import annotations

import click

WHOLE = 1000  # characters, more than any sentence has


class Commands(click.Group):
    """Lists commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.commands[name].get_short_help_str(WHOLE)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
