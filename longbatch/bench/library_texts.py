"""Long natural documents that lie on every machine: the sources and the reference prose of Python's standard library.

They are under the PSF licence and need no network. Calibration and evaluation share no file. Texts differ a little from
one Python version to the next, so calibrate and evaluate with the same interpreter.

    python -m longbatch.bench.library_texts calibration FILE.jsonl

writes a manifest of either part.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from longbatch.errors import UsageError

# The reference's topics, in alphabetical order, make one long text; documents are pieces of it.
TOPIC_PIECE = 155_000
CALIBRATION = {
    "reference-1": (),
    "processes": ("subprocess", "shutil", "os", "signal"),
    "logging": ("logging/__init__", "logging/handlers", "logging/config"),
    "dates": ("_pydatetime", "datetime", "_strptime", "calendar", "zoneinfo/_common", "locale"),
    "addresses": ("ipaddress", "socket", "ssl", "selectors", "socketserver"),
    "pools": ("multiprocessing/managers", "multiprocessing/pool", "multiprocessing/util", "concurrent/futures/process"),
}
EVALUATION = {
    "reference-2": (),
    "reference-3": (),
    "decimal": ("_pydecimal",),
    "turtle": ("turtle",),
    "inspect": ("inspect", "dis", "opcode"),
    "typing": ("typing", "types", "functools"),
    "archives": ("tarfile", "zipfile", "zipfile/__init__", "gzip"),
    "options": ("argparse", "optparse", "getopt"),
    "doctest": ("doctest", "pydoc"),
    "mock": ("unittest/mock", "unittest/case"),
    "mail": ("mailbox", "smtplib", "imaplib", "poplib"),
    "pickles": ("pickletools", "pickle", "copy"),
    "headers": ("email/_header_value_parser", "email/message", "email/utils"),
    "requests": ("urllib/request", "urllib/parse", "http/client", "http/cookiejar"),
    "differences": ("difflib", "enum", "dataclasses", "textwrap"),
    "numbers": ("statistics", "random", "fractions", "numbers"),
}
PARTS = {"calibration": CALIBRATION, "evaluation": EVALUATION}


def documents(part: str) -> dict[str, str]:
    """Texts by name, the order fixed. Raises UsageError where the library's sources are not installed."""
    library = Path(sysconfig.get_path("stdlib"))
    found = {}
    for name, modules in PARTS[part].items():
        if not modules:
            found[name] = _reference(int(name.rpartition("-")[2]))
            continue
        # Which of these modules there are depends on the version of Python.
        paths = [path for path in (library / f"{module}.py" for module in modules) if path.is_file()]
        if paths:
            found[name] = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    if len(found) < len(PARTS[part]):
        missing = ", ".join(name for name in PARTS[part] if name not in found)
        raise UsageError(f"the sources of Python's library are not in {library}: {missing}", hint="use --documents")
    return found


def _reference(number: int) -> str:
    from pydoc_data.topics import topics

    whole = "\n\n".join(topics[name] for name in sorted(topics))
    return whole[(number - 1) * TOPIC_PIECE : number * TOPIC_PIECE]


def main(arguments: Sequence[str]) -> None:
    """Write the manifest of a part."""
    if len(arguments) != 2 or arguments[0] not in PARTS:
        raise SystemExit(f"usage: python -m longbatch.bench.library_texts {'|'.join(PARTS)} FILE.jsonl")
    rows = [json.dumps({"id": name, "prompt": text}) for name, text in documents(arguments[0]).items()]
    Path(arguments[1]).write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
