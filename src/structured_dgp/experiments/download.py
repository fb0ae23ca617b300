"""The official files of the data sets that are not embedded: fetched, compared with their hashes, and converted.

Hashes are of the raw file, inside its archive where there is one, and of the CSV file that is made from it
(``data.SOURCES``), so neither a changed download nor a wrong conversion can pass for the data of the paper.
"""

from __future__ import annotations

import csv
import hashlib
import io
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pooch
from jaxtyping import Float

from structured_dgp.exceptions import InputError
from structured_dgp.files import replacing

UCI = "https://archive.ics.uci.edu/static/public"
Matrix = Float[np.ndarray, "n columns"]


def _words(raw: bytes, columns: int) -> Matrix:
    """Numbers between white space, ``columns`` in a row whatever the lines are."""
    return np.array(raw.split(), np.float64).reshape(-1, columns)


def _separated(raw: bytes, delimiter: str = ",") -> Matrix:
    """Numbers below one header line."""
    _, *rows = csv.reader(io.StringIO(raw.decode()), delimiter=delimiter)
    return np.array([row for row in rows if row], np.float64)


def _sheet(raw: bytes) -> Matrix:
    """Numbers below the header of the first sheet of a workbook."""
    try:
        from openpyxl import load_workbook
    except ImportError as error:
        raise InputError("converting a workbook needs openpyxl: pip install 'structured-dgp[data]'.") from error
    sheet = load_workbook(io.BytesIO(raw), read_only=True, data_only=True).worksheets[0]
    _, *rows = sheet.iter_rows(values_only=True)
    return np.array([row for row in rows if row[0] is not None], np.float64)


@dataclass(frozen=True)
class Official:
    """Where a data set comes from, and how its raw file becomes a table.

    Attributes:
        address: of the file, or of the archive it is in.
        member: its path inside the archive; None for a plain file.
        sha256: of the raw file.
        header: names of the columns, the target last.
        read: the columns from the raw file, in the order of the header.
    """

    address: str
    member: str | None
    sha256: str
    header: str
    read: Callable[[bytes], Matrix]


OFFICIAL: dict[str, Official] = {
    "boston": Official(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/housing/housing.data",
        None,
        "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a",
        "CRIM,ZN,INDUS,CHAS,NOX,RM,AGE,DIS,RAD,TAX,PTRATIO,B,LSTAT,MEDV",
        lambda raw: _words(raw, 14),
    ),
    "wine_red": Official(
        f"{UCI}/186/wine+quality.zip",
        "winequality-red.csv",
        "4a402cf041b025d4566d954c3b9ba8635a3a8a01e039005d97d6a710278cf05e",
        "fixed_acidity,volatile_acidity,citric_acid,residual_sugar,chlorides,free_sulfur_dioxide,"
        "total_sulfur_dioxide,density,pH,sulphates,alcohol,quality",
        lambda raw: _separated(raw, ";"),
    ),
    "kin8nm": Official(
        "https://www.openml.org/data/get_csv/3626/dataset_2175_kin8nm.arff",
        None,
        "7b9bf0301ac936d88122557a151e1ba8f1ebc278fcf46d9f3c6d462debdbc8ad",
        "theta1,theta2,theta3,theta4,theta5,theta6,theta7,theta8,y",
        _separated,
    ),
    "power": Official(
        f"{UCI}/294/combined+cycle+power+plant.zip",
        "CCPP/Folds5x2_pp.xlsx",
        "ccd490981db2a2f079963b3d9f0aea30d9d338900a0285428dfc6385396f4651",
        "AT,V,AP,RH,PE",
        _sheet,
    ),
    "naval": Official(
        f"{UCI}/316/condition+based+maintenance+of+naval+propulsion+plants.zip",
        "UCI CBM Dataset/data.txt",
        "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6",
        "lp,v,GTT,GTn,GGn,Ts,Tp,T48,T1,T2,P48,P1,P2,Pexh,TIC,mf,compressor_decay",
        lambda raw: _words(raw, 18)[:, :17],  # the last column is another target
    ),
    "protein": Official(
        f"{UCI}/265/physicochemical+properties+of+protein+tertiary+structure.zip",
        "CASP.csv",
        "4277cfcb4e91a181746cbc654f001b57951c9e6a80f4f795fdb5c807e0848f40",
        "F1,F2,F3,F4,F5,F6,F7,F8,F9,RMSD",
        lambda raw: np.roll(_separated(raw), -1, axis=1),  # the target is the first column there
    ),
}
"""By name."""


class NotHereError(InputError):
    """A data set that is neither on this machine nor can be downloaded."""


def fetch(name: str, folder: Path, sha256: str) -> Path:
    """Download a data set into ``folder`` and return the path of its CSV file, which has this hash."""
    source = OFFICIAL[name]
    with tempfile.TemporaryDirectory() as temporary:
        try:
            path = Path(pooch.retrieve(source.address, known_hash=None, path=temporary, fname="raw"))
        except Exception as error:  # the libraries below have many errors for a network that fails
            raise NotHereError(
                f"{name} is not here and cannot be downloaded ({type(error).__name__}): name the folder that holds "
                f"{name}.csv with --data-dir, or with SDGP_DATA."
            ) from error
        raw = raw_file(path, source)
    text = convert(name, raw)
    if hashlib.sha256(text).hexdigest() != sha256:
        raise InputError(f"the official file of {name} was converted to something else than the data set of the paper.")
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / f"{name}.csv") as file:
        file.write(text)
    return folder / f"{name}.csv"


def raw_file(path: Path, source: Official) -> bytes:
    """The raw file, out of its archive, after its hash has been checked."""
    try:
        raw = path.read_bytes() if source.member is None else zipfile.ZipFile(path).read(source.member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{source.address} does not hold {source.member}: {error}.") from error
    found = hashlib.sha256(raw).hexdigest()
    if found != source.sha256:
        raise InputError(
            f"{source.address} has changed: its sha256 is {found[:12]}..., not {source.sha256[:12]}..., and not kept."
        )
    return raw


def convert(name: str, raw: bytes) -> bytes:
    """The CSV file of a data set from its raw file: one header line, the target last, shortest decimal numbers."""
    source = OFFICIAL[name]
    try:
        values = source.read(raw)
    except (ValueError, IndexError) as error:
        raise InputError(f"the raw file of {name} is not what it should be: {error}.") from error
    lines = [",".join(repr(value).removesuffix(".0") for value in row) for row in values.tolist()]
    return "\n".join([source.header, *lines, ""]).encode()
