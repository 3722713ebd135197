"""A measurement's results as text for people, CSV for spreadsheets and one JSON line for machines."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.errors import ConfigError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """key       in the record, and the column's name in CSV and JSON
    heading   over the text column
    show      the value as text
    """

    key: str
    heading: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Table:
    """name      key of the records in the JSON line, and the end of the CSV file's name
    title     what is shown, and `about` of what: the line above; notes are the lines below
    records   one a line, in order, with at least the columns' keys; None shows as a dash
    """

    name: str
    title: str
    about: str
    columns: tuple[Column, ...]
    records: Sequence[Record]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Right-aligned columns under their headings."""
        cells = [[column.heading for column in self.columns]]
        cells += [[_shown(column, record[column.key]) for column in self.columns] for record in self.records]
        widths = [max(len(line[index]) for line in cells) for index in range(len(self.columns))]
        lines = [
            "  " + "   ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        ]
        return "\n".join([f"{self.title}: {self.about}", *lines, *(f"  {note}" for note in self.notes)])

    def rows(self) -> list[Record]:
        """The records with the columns' keys alone: what CSV and JSON hold."""
        return [{column.key: record[column.key] for column in self.columns} for record in self.records]

    def write_csv(self, path: Path) -> None:
        """A header of keys, then raw values. Raises ConfigError."""
        try:
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, [column.key for column in self.columns], lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.rows())
        except OSError as error:
            raise ConfigError(f"--csv: {path} cannot be written: {error.strerror}; name another folder") from error


def publish(
    bench: str,
    heading: str,
    tables: Sequence[Table],
    summary: Record,
    *,
    csv_folder: Path | None,
    picture: tuple[Path, str] | None,
    csv_tables: Sequence[Table] | None = None,
) -> None:
    """Print a measurement's heading and tables, write its files, and print, as stdout's last line, one JSON object:
    `bench`, the summary, and the tables' records.

    picture     where to and what
    csv_tables  what goes into the folder, where that is not the tables
    Raises ConfigError for a file that cannot be written; the tables are printed all the same.
    """
    print("\n\n".join([heading, *(table.text() for table in tables)]), end="\n\n")
    written: list[Path] = []
    if csv_folder is not None:
        for table in csv_tables or tables:
            written.append(csv_folder / f"{bench}-{table.name}.csv")
            table.write_csv(written[-1])
    if picture is not None:
        path, markup = picture
        try:
            path.write_text(markup, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--picture: {path} cannot be written: {error.strerror}; name another file") from error
        written.append(path)
    if written:
        print(f"written: {', '.join(map(str, written))}", end="\n\n")
    print(json.dumps({"bench": bench, **summary, **{table.name: table.rows() for table in tables}}), flush=True)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def two_decimals(seconds: float) -> str:
    return f"{seconds:,.2f} s"


def thousands(value: int) -> str:
    return f"{value:,}"


def whole(value: float) -> str:
    return f"{value:,.0f}"


def percent(share: float) -> str:
    return f"{share:.0%}"


def times(ratio: float) -> str:
    return f"{ratio:.2f} x"


def _shown(column: Column, value: Any) -> str:
    return "-" if value is None else column.show(value)
