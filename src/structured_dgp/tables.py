"""Tables in files, CSV and Parquet: read as a whole or piece by piece, written piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as parquet
from jaxtyping import Float

from structured_dgp.exceptions import InputError
from structured_dgp.files import replacing

BLOCK_BYTES = 4 << 20  # of CSV text read at a time
BLOCK_ROWS = 65_536  # of Parquet read at a time
HEADER_BYTES = 1 << 20  # that are searched for the end of the header
SEPARATORS = (",", ";", "\t")
MISSING = (*csv.ConvertOptions().null_values, "<NA>", "None", "?")
NUMBER = r"(?i)^\s*[+-]?(\d+\.?\d*|\.\d+|inf(inity)?)(e[+-]?\d+)?\s*$"
WRITTEN = (".csv", ".tsv", ".txt", ".parquet", ".pq")  # suffixes of tables that can be written


def is_parquet(path: str | Path) -> bool:
    return Path(path).suffix.lower() in (".parquet", ".pq")


def check_suffix(path: str | Path) -> None:
    """Refuse to write a table under a name that says something else."""
    if Path(path).suffix.lower() not in WRITTEN:
        raise InputError(f"a table cannot be written to {Path(path).name}: end its name in {', '.join(WRITTEN)}.")


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """What Arrow says about a file, as one of our errors with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}.") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name} cannot be read: {error}.") from error


def column_names(path: str | Path) -> list[str]:
    """The names of a table's columns."""
    path = Path(path)
    with _named_errors(path):
        if is_parquet(path):
            names = list(parquet.read_schema(path).names)
        else:
            with csv.open_csv(path, parse_options=_parse_options(path)) as reader:
                names = list(reader.schema.names)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"{path.name} has two columns named {twice[0]!r}: rename one of them.")
    return names


def _parse_options(path: Path) -> csv.ParseOptions:
    """The separator is the one of ``SEPARATORS`` that occurs most often in the first line, outside of quotes."""
    with pa.input_stream(path) as file:  # unpacks what is compressed
        start = file.read(HEADER_BYTES).decode("utf-8-sig", errors="replace")
    lines = re.sub(r'(^|[,;\t])"([^"]|"")*"', r"\1name", start).splitlines()
    first = next(filter(None, lines), "")
    separator = max(SEPARATORS, key=first.count)
    # in a single column, an empty line after the header is a missing value
    return csv.ParseOptions(delimiter=separator, ignore_empty_lines=separator in first or first not in lines[:1])


def read_table(path: str | Path, text: Sequence[str] = ()) -> pa.Table:
    """A whole table; the columns ``text`` as they are written."""
    path = Path(path)
    require_columns(column_names(path), text, path.name)
    with _named_errors(path):
        if is_parquet(path):
            table = parquet.read_table(path)
            for name in text:
                table = table.set_column(table.column_names.index(name), name, table[name].cast(pa.string()))
        else:
            types = dict.fromkeys(text, pa.string())
            options = csv.ConvertOptions(null_values=MISSING, strings_can_be_null=True, column_types=types)
            table = csv.read_csv(path, parse_options=_parse_options(path), convert_options=options)
    if table.num_rows == 0:
        raise InputError(f"{path.name} has no rows.")
    return table


def index_columns(table: pa.Table) -> list[str]:
    """The columns that hold the row index of a pandas frame; it writes them to Parquet files."""
    told = (table.schema.pandas_metadata or {}).get("index_columns", [])
    return [name for name in table.column_names if name in told or re.fullmatch(r"__index_level_\d+__", name)]


def stream_table(path: str | Path, numbers: Sequence[str], kept: Sequence[str] = ()) -> Iterator[pa.Table]:
    """The rows of some columns, in their order and in pieces: ``numbers`` as float64 or bool, ``kept`` as they are."""
    path = Path(path)
    require_columns(column_names(path), [*numbers, *kept], path.name)
    wanted = [*numbers, *(name for name in kept if name not in numbers)]
    with _named_errors(path):
        if is_parquet(path):
            for batch in parquet.ParquetFile(path).iter_batches(BLOCK_ROWS, columns=wanted):
                yield pa.Table.from_batches([batch]).select(wanted)
            return
    with _named_errors(path), csv.open_csv(path, parse_options=_parse_options(path)) as reader:
        truths = {field.name for field in reader.schema if pa.types.is_boolean(field.type)}
    types = {name: pa.bool_() if name in truths else pa.float64() for name in numbers}
    types |= {name: pa.string() for name in kept if name not in numbers}
    try:
        with csv.open_csv(
            path,
            read_options=csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
            parse_options=_parse_options(path),
            convert_options=csv.ConvertOptions(
                column_types=types, include_columns=wanted, null_values=MISSING, strings_can_be_null=False
            ),
        ) as reader:
            for batch in reader:
                yield pa.Table.from_batches([batch])
    except pa.ArrowInvalid as error:
        # "In CSV column #3: Row #17: CSV conversion error to double: invalid value 'x'"
        found = re.search(r"column #(\d+).*?Row #(\d+).*invalid value '(.*)'", str(error))
        if found is None:
            raise InputError(f"{path.name} cannot be read: {error}.") from error
        column, row, value = found.groups()
        name = column_names(path)[int(column)]
        raise InputError(f"column {name!r} must hold numbers, but line {row} of {path.name} has {value!r}.") from error


def require_columns(present: Sequence[str], wanted: Sequence[str], where: str) -> None:
    """Raise an error that names the first column that is not there."""
    for name in wanted:
        if name not in present:
            raise InputError(f"{where} has no column {name!r}; its columns are {', '.join(present)}.")


def is_text(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def looks_numeric(column: pa.ChunkedArray) -> bool:
    """Whether most values of a column of text are numbers, with or without commas in them."""
    numbers = _is_number(pc.replace_substring(column.cast(pa.string()), ",", ""))
    return 2 * pc.sum(numbers, min_count=0).as_py() > len(column) - column.null_count


def first_word(column: pa.ChunkedArray) -> tuple[int, str]:
    """The place of the first value of a column of text that is not a number, and that value."""
    words = pc.invert(pc.fill_null(_is_number(column), True))
    place = max(pc.index(words, True).as_py(), 0)
    return place, str(column[place].as_py())


def _is_number(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.match_substring_regex(column.cast(pa.string()), NUMBER)


def refuse_text(table: pa.Table, first_row: int = 1, has_options: bool = False) -> None:
    """Raise an error that names a column of text and its first value that is not a number; see ``as_numbers``."""
    for name in table.column_names:
        if is_text(table[name]):
            place, word = first_word(table[name])
            raise InputError(
                f"column {name!r} holds text ({word!r} in data row {first_row + place}): "
                f"{f'leave it out (--drop {name}), or ' if has_options else ''}write it as numbers."
            )


def as_numbers(table: pa.Table, first_row: int = 1, has_options: bool = False) -> pa.Table:
    """Every column as float64; an error that names the column and the row for text and for missing values.

    Args:
        first_row: the number of the first row, for the error; rows of data are counted from 1.
        has_options: whether rows and columns can be left out with ``--skip-missing`` and ``--drop``.
    """
    refuse_text(table, first_row, has_options)
    columns: dict[str, Any] = {}
    for name in table.column_names:
        column = table[name]
        try:
            numbers = column.cast(pa.float64(), safe=False)  # long integers are rounded, as in a CSV file
        except pa.ArrowException as error:
            raise InputError(f"column {name!r} holds {column.type}, not numbers: leave it out.") from error
        missing = np.flatnonzero(~np.isfinite(numbers.to_numpy()))
        if len(missing):
            options = f", or leave out the column (--drop {name})" if has_options else ""
            raise InputError(
                f"column {name!r} has {len(missing)} missing or infinite values, the first in data row "
                f"{first_row + int(missing[0])}: fill them in, or leave out the rows"
                f"{' (--skip-missing)' if has_options else ''}{options}."
            )
        columns[name] = numbers
    return pa.table(columns)


def without_missing(table: pa.Table) -> pa.Table:
    """The rows in which nothing is missing."""
    keep: Any = None
    for name in table.column_names:
        here = pc.is_valid(table[name])
        if pa.types.is_floating(table[name].type):
            here = pc.and_(here, pc.fill_null(pc.is_finite(table[name]), False))
        keep = here if keep is None else pc.and_(keep, here)
    return table.filter(keep)


def as_matrix(table: pa.Table) -> Float[np.ndarray, "n D"]:
    return np.column_stack([table[name].to_numpy() for name in table.column_names]).astype(np.float64)


class Writer(Protocol):
    """What writes pieces of a table."""

    def write_table(self, table: pa.Table) -> None: ...


@contextmanager
def table_writer(path: str | Path, schema: pa.Schema) -> Iterator[Writer]:
    """Writes pieces of a table to a file that appears under its name when it is complete."""
    path = Path(path)
    check_suffix(path)
    options = csv.WriteOptions(delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    with replacing(path) as file:
        opened = (
            parquet.ParquetWriter(file, schema)
            if is_parquet(path)
            else csv.CSVWriter(file, schema, write_options=options)
        )
        with opened as writer:
            yield writer
