"""A table of texts, for a terminal, for Markdown and for LaTeX; a page's template makes HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from rich.table import Table as RichTable
from rich.text import Text

MAX_COLUMNS = 4
"""Beyond this many columns a terminal's table is turned."""
LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
LATEX |= {"±": r"$\pm$", "×": r"$\times$", "–": "--"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
LATEX |= {letter: f"{{{letter}}}" for letter in "[*"}  # a row that begins so would change its break


@dataclass(frozen=True)
class Name:
    """What a row or a column is called."""

    text: str
    note: str = ""
    """What stands under it in small letters."""
    hint: str = ""
    """What it means; a page shows it on hover."""

    @property
    def lines(self) -> str:
        """Return name and note, on a line each."""
        return f"{self.text}\n{self.note}" if self.note else self.text


@dataclass(frozen=True)
class Table:
    """Texts by row and column."""

    columns: Sequence[Name]
    rows: Sequence[Name]
    cells: Sequence[Sequence[str]]
    """By row and column."""
    bold: Collection[tuple[int, int]] = ()
    """Row and column of each cell that is better than its rivals."""
    captions: Sequence[str] = ()
    corner: str = ""

    def turned(self) -> Table:
        """Return the table with its rows as columns."""
        cells = [list(column) for column in zip(*self.cells, strict=True)]
        bold = {(column, row) for row, column in self.bold}
        return replace(self, columns=self.rows, rows=self.columns, cells=cells, bold=bold)

    def rich(self, title: str = "") -> RichTable:
        """Return it for a terminal; with more than a few columns it is turned."""
        table = self.turned() if len(self.columns) > MAX_COLUMNS else self
        lines = [line for caption in self.captions for line in caption.splitlines()]
        width = max(map(len, (title, *lines))) if len(table.columns) == 1 else 0
        out = RichTable(
            title=Text(title) if title else None,
            title_justify="left",
            caption=Text("\n".join(lines)) if lines else None,
            min_width=width or None,
        )
        out.add_column(table.corner)
        for column in table.columns:
            out.add_column(Text(column.lines), justify="right")
        for down, (name, cells) in enumerate(zip(table.rows, table.cells, strict=True)):
            texts = [Text(t, "bold" * ((down, at) in table.bold)) for at, t in enumerate(cells)]
            out.add_row(Text(name.lines), *texts)
        return out

    def markdown(self) -> str:
        """Return it in Markdown."""
        heads = [self.corner and f"{self.corner} ", *(f" {name.text} " for name in self.columns)]
        heads = [*map(_in_a_cell, heads)]
        lines = [f"| {'|'.join(heads)}|", "|---" * (len(self.columns) + 1) + "|"]
        for down, (name, cells) in enumerate(zip(self.rows, self.cells, strict=True)):
            texts = [f"**{t}**" if (down, at) in self.bold else t for at, t in enumerate(cells)]
            lines.append(f"| {' | '.join(map(_in_a_cell, [name.text, *texts]))} |")
        return "\n".join(lines) + "\n"

    def latex(self) -> str:
        """Return it for LaTeX, with its captions as one; it needs the package booktabs."""
        names = [self.corner, *(name.text for name in self.columns)]
        lines = [r"\begin{tabular}{l" + "r" * len(self.columns) + "}", r"\toprule"]
        lines.append(" & ".join(map(_escaped, names)) + r" \\ \midrule")
        for down, (name, cells) in enumerate(zip(self.rows, self.cells, strict=True)):
            texts = [
                rf"\textbf{{{_escaped(text)}}}" if (down, at) in self.bold else _escaped(text)
                for at, text in enumerate(cells)
            ]
            lines.append(" & ".join([_escaped(name.text), *texts]) + r" \\")
        lines += [r"\bottomrule", r"\end{tabular}"]
        if self.captions:
            caption = rf"\caption{{{_escaped(' '.join(self.captions))}}}"
            lines = [r"\begin{table}", r"\centering", caption, *lines, r"\end{table}"]
        return "\n".join(lines) + "\n"


def _in_a_cell(text: str) -> str:
    """Return a text that ends no cell and no row of Markdown."""
    return text.replace("|", r"\|").replace("\n", " ")


def _escaped(text: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in text)
