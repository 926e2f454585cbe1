"""What a person sees: rich where it is installed and the output is a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TextIO


class Advance(Protocol):
    """Reports one finished step of a progress display, with a word about it."""

    def __call__(self, note: str = "") -> None: ...


class Screen:
    """Plain text, aligned, without control characters; the base that ``RichScreen`` dresses up."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    def heading(self, text: str) -> None:
        self.line(f"\n{text}\n{'-' * len(text)}")

    def pairs(self, items: Mapping[str, object]) -> None:
        """Names and values, the values aligned."""
        width = max((len(name) for name in items), default=0)
        for name, value in items.items():
            first, *others = str(value).split("\n")
            self.line(f"  {name:<{width}}  {first}")
            for other in others:
                self.line(f"  {'':<{width}}  {other}")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Columns that hold only numbers are aligned to the right."""
        cells = [[str(cell) for cell in row] for row in rows]
        widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
        right = [is_numeric([row[i] for row in cells]) for i in range(len(columns))]
        for row in [list(columns), ["-" * width for width in widths], *cells]:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
            self.line("  " + "  ".join(padded).rstrip())

    def source(self, text: str, language: str) -> None:
        """Code, unchanged."""
        self.line(text.rstrip("\n"))

    def markdown(self, text: str) -> None:
        """A whole document."""
        self.line(text.rstrip("\n"))

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Advance]:
        """Counts steps; one line each."""
        done = 0
        self.line(title)

        def advance(note: str = "") -> None:
            nonlocal done
            done += 1
            self.line(f"  [{done:>{len(str(total))}}/{total}] {note}".rstrip())

        yield advance


class RichScreen(Screen):
    """The same with colour, boxes and a moving bar."""

    def __init__(self, out: TextIO | None = None) -> None:
        from rich.console import Console

        super().__init__(out)
        self.console: Any = Console(file=self._out, highlight=False)

    def line(self, text: str = "") -> None:
        self.console.print(text, markup=False)

    def heading(self, text: str) -> None:
        from rich.text import Text

        self.console.print()
        self.console.print(Text(text, style="bold cyan"))

    def pairs(self, items: Mapping[str, object]) -> None:
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in items.items():
            grid.add_row(Text("  " + name), Text(str(value)))
        self.console.print(grid)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=True)
        cells = [[str(cell) for cell in row] for row in rows]
        for i, name in enumerate(columns):
            numeric = is_numeric([row[i] for row in cells])
            table.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print(table)

    def source(self, text: str, language: str) -> None:
        from rich.syntax import Syntax

        # As text, which a narrow terminal wraps: Syntax itself cuts lines off at its edge.
        code = Syntax(text, language, background_color="default").highlight(text.rstrip("\n"))
        self.console.print(code, soft_wrap=True)

    def markdown(self, text: str) -> None:
        from rich.markdown import Markdown

        self.console.print(Markdown(text))

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Advance]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        columns = (
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")),
            BarColumn(bar_width=10),
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total)) + 1)),
            TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
            TextColumn("[dim]{task.fields[note]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        )
        with Progress(*columns, console=self.console, expand=True) as bar:
            task = bar.add_task(title, total=total, note="")

            def advance(note: str = "") -> None:
                bar.update(task, advance=1, note=note)

            yield advance


def is_numeric(cells: Sequence[str]) -> bool:
    """Whether every cell that is not empty starts with a digit, a sign or a dash for "nothing"."""
    filled = [cell for cell in cells if cell.strip()]
    return bool(filled) and all(cell.strip()[0] in "0123456789+-<." for cell in filled)


def make_screen(out: TextIO | None = None) -> Screen:
    """A rich screen on a terminal that can show one.

    Raises
    ------
    OSError
        Standard output is closed.
    """
    out = out or sys.stdout
    if out is None:
        raise OSError("there is no standard output to write to")
    if out.isatty() and importlib.util.find_spec("rich") is not None:
        return RichScreen(out)
    return Screen(out)
