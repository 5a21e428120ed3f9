"""Tables on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FILE_WIDTH = 200


def standard_output() -> Console:
    """A console on standard output that prints text as it is; wide where it is a file or a pipe, so that nothing is
    cut there."""
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else FILE_WIDTH)


def plain_table(*columns: str) -> Table:
    """A table without lines; a leading > in a heading puts the column's values to the right. Without any heading
    there is no heading line."""
    from rich.table import Table

    named = any(column.strip(">") for column in columns)
    table = Table(box=None, show_header=named, padding=(0, 2), header_style="")
    for column in columns:
        table.add_column(column.strip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table
