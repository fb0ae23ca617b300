"""Official files become the CSV files whose hashes are known; anything else is refused."""

from __future__ import annotations

import hashlib
import io
import shutil
import textwrap
import zipfile
from pathlib import Path

import pytest

from structured_dgp.exceptions import InputError
from structured_dgp.experiments import download
from structured_dgp.experiments.data import SOURCES, load
from structured_dgp.experiments.download import OFFICIAL, Official, convert, fetch

SHARED = Path(__file__).parents[2] / "shared" / "data"


def as_official(name: str, text: str) -> bytes:
    """The official layout of a data set, from its CSV file."""
    header, *lines = text.splitlines()
    rows = [line.split(",") for line in lines]
    if name == "boston":  # rows run over several lines
        return "\n".join(textwrap.fill(" ".join(row), 60) for row in rows).encode()
    if name == "wine_red":
        quoted = ";".join(f'"{column.replace("_", " ")}"' for column in header.split(","))
        return "\n".join([quoted, *(";".join(row) for row in rows), ""]).encode()
    if name == "naval":
        return "\n".join("   ".join(f"{float(cell):.7e}" for cell in [*row, "1.0"]) for row in rows).encode()
    if name == "protein":
        return "\n".join(["RMSD,F1,...", *(",".join([row[-1], *row[:-1]]) for row in rows)]).encode()
    if name == "power":
        openpyxl = pytest.importorskip("openpyxl")
        book = openpyxl.Workbook()
        for row in [header.split(","), *(map(float, row) for row in rows)]:
            book.active.append(list(row))
        book.create_sheet("Sheet2").append(["another", "sheet"])
        buffer = io.BytesIO()
        book.save(buffer)
        return buffer.getvalue()
    return text.encode()


@pytest.mark.parametrize("name", list(OFFICIAL))
def test_the_conversion_gives_the_known_file(name: str) -> None:
    path = SHARED / f"{name}.csv"
    if not path.is_file():
        pytest.skip(f"{name}.csv is not here")
    made = convert(name, as_official(name, path.read_text()))
    assert hashlib.sha256(made).hexdigest() == SOURCES[name].sha256


def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str | None) -> bytes:
    """A tiny official data set, served from a file instead of the network."""
    raw = b"x,y\n1.50,2\n3,1e-5\n"
    source = tmp_path / "source"
    if member is None:
        source.write_bytes(raw)
    else:
        with zipfile.ZipFile(source, "w") as archive:
            archive.writestr(member, raw)
    official = Official("https://example.org/tiny", member, hashlib.sha256(raw).hexdigest(), "x,y", download._separated)
    monkeypatch.setitem(OFFICIAL, "kin8nm", official)

    def retrieve(address: str, known_hash: None, path: str, fname: str) -> str:
        assert address == "https://example.org/tiny"
        return str(shutil.copy(source, Path(path) / fname))

    monkeypatch.setattr(download.pooch, "retrieve", retrieve)
    return raw


MADE = hashlib.sha256(b"x,y\n1.5,2\n3,1e-05\n").hexdigest()


@pytest.mark.parametrize("member", [None, "folder/tiny.csv"])
def test_a_download_ends_as_a_csv_file(member: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path, monkeypatch, member)
    path = fetch("kin8nm", tmp_path / "cache", MADE)
    assert path.read_text() == "x,y\n1.5,2\n3,1e-05\n"
    assert list((tmp_path / "cache").iterdir()) == [path]


def test_a_changed_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path, monkeypatch, None)
    (tmp_path / "source").write_bytes(b"x,y\n1,2\n")
    with pytest.raises(InputError, match="has changed"):
        fetch("kin8nm", tmp_path / "cache", MADE)
    small(tmp_path, monkeypatch, "tiny.csv")
    (tmp_path / "source").write_bytes(b"not an archive")
    with pytest.raises(InputError, match=r"tiny\.csv"):
        fetch("kin8nm", tmp_path / "cache", MADE)
    assert not (tmp_path / "cache").exists()


def test_a_good_download_of_other_numbers_is_not_the_papers_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(tmp_path, monkeypatch, None)
    monkeypatch.delenv("SDGP_DATA", raising=False)
    monkeypatch.setattr("structured_dgp.experiments.data.pooch.os_cache", lambda name: tmp_path / "cache")
    with pytest.raises(InputError, match="something else than the data set of the paper"):
        load("kin8nm")
    assert not (tmp_path / "cache").exists()


def test_a_raw_file_of_another_shape_is_refused() -> None:
    with pytest.raises(InputError, match="boston"):
        convert("boston", b"1 2 3")
