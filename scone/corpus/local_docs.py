"""`local-docs:` — the docstrings and READMEs that lie on every machine on which the project is installed.

    local-docs:                everything below
    local-docs:stdlib          docstrings of the standard library, and the topics of Python's help()
    local-docs:numpy,torch     docstrings, READMEs and package descriptions of installed packages

Real English about code, read in place and never copied elsewhere, in a size that a laptop can train on. Each
package is a group of documents, so that held-out packages are unseen. Files that Python cannot parse, tests
and vendored copies of other packages are passed over.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import difflib
import functools
import gc
import importlib.metadata
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scone.corpus.document import Document, Part
from scone.errors import CorpusError

PREFIX = "local-docs:"
STDLIB = "stdlib"

_MIN_CHARACTERS = 80  # shorter docstrings say little more than the name they stand under
_OWN_PACKAGE = "scone"  # its README changes with every commit
_TESTS = {"test", "tests", "__pycache__", "site-packages", "dist-packages", "idlelib", "lib2to3"}
_COPIES = {"vendor", "vendored", "_vendor", "third_party", "thirdparty", "thirdparty_files"}
_PASSED_OVER = frozenset(_TESTS | _COPIES)
_README = re.compile(r"readme(\.(md|rst|txt))?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Package:
    """An installed package with the files that are read, by path relative to `root`, and their sizes."""

    name: str
    version: str
    root: Path
    files: tuple[tuple[str, int], ...]


def list_packages(spec: str) -> list[Part]:
    """A part for each package that `spec` names, `stdlib` first and then by name.

    Raises:
        CorpusError: A package is not installed.
    """
    packages = _packages()
    wanted = [_normalize(name) for name in spec.removeprefix(PREFIX).split(",") if name.strip()]
    for name in wanted:
        if name not in packages:
            nearest = difflib.get_close_matches(name, packages, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"{PREFIX}{STDLIB} is always there"
            raise CorpusError(f"{spec}: package {name!r} is not installed here; {hint}")
    return [_part_of(packages[name]) for name in packages if not wanted or name in wanted]


def split_package(part: Part, unit_bytes: int) -> list[Part]:
    """Runs of files of about `unit_bytes`."""
    pieces = []
    start, size = 0, 0
    files = _packages()[part.location].files
    for index, (_, num_bytes) in enumerate(files):
        size += num_bytes
        if size >= unit_bytes or index == len(files) - 1:
            pieces.append(replace(part, start=start, stop=index + 1, num_bytes=size))
            start, size = index + 1, 0
    return pieces or [part]


def read_package(part: Part) -> Iterator[Document]:
    """Documents of a package: its description, then its files in order of path.

    Raises:
        CorpusError: This host has another version of the package than the one that listed it, or none.
    """
    package = _packages().get(part.location)
    found = package.version if package else "none"
    if package is None or found != part.version:
        raise CorpusError(
            f"{part.source} {part.version} was listed, but {platform.node()} has {found}; "
            "install the same packages on every host, or use a corpus in shared storage"
        )
    if part.start == 0:
        yield from _descriptions(package)
    stop = part.stop or len(package.files)
    for path, _ in package.files[part.start : stop]:
        for position, text in _texts_of_file(package.root / path):
            yield Document(f"{path}:{position}", package.name, package.name, text)


def _part_of(package: _Package) -> Part:
    return Part(
        source=package.name,
        format="local-docs",
        location=package.name,
        num_bytes=max(1, sum(size for _, size in package.files)),
        version=package.version,
    )


@functools.cache
def _packages() -> dict[str, _Package]:
    """Everything installed, by normalized name. A file that several distributions claim belongs to the first."""
    distributions: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        with contextlib.suppress(Exception):  # half-removed distributions have no readable metadata
            distributions.setdefault(_normalize(distribution.metadata["Name"]), distribution)
    packages = {STDLIB: _standard_library()}
    claimed: set[str] = set()
    for name in sorted(distributions):
        if name in (_OWN_PACKAGE, STDLIB):
            continue
        root = str(distributions[name].locate_file(""))
        files = [row for row in _recorded_files(distributions[name]) if f"{root}/{row[0]}" not in claimed]
        claimed.update(f"{root}/{path}" for path, _ in files)
        packages[name] = _Package(name, distributions[name].version, Path(root), tuple(files))
    return packages


def _recorded_files(distribution: importlib.metadata.Distribution) -> list[tuple[str, int]]:
    """Path and size of the files to read, from the list that the installer wrote; none for editable installs."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    rows = csv.reader(line for line in lines if ".py," in line or "readme" in line.lower())
    return sorted((row[0], int(row[2] or 0)) for row in rows if len(row) == 3 and _is_read(row[0]))


def _standard_library() -> _Package:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in _PASSED_OVER)
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if _is_read(relative) and path.is_file():
                files.append((relative, path.stat().st_size))
    return _Package(STDLIB, platform.python_version(), root, tuple(sorted(files)))


def _is_read(path: str) -> bool:
    *folders, name = path.split("/")
    if ".." in folders or not _PASSED_OVER.isdisjoint(folders):
        return False
    return name.endswith(".py") or bool(_README.fullmatch(name))


def _descriptions(package: _Package) -> Iterator[Document]:
    """Python's help topics, or what the package index shows of a package."""
    if package.name == STDLIB:
        with contextlib.suppress(ImportError):  # some distributions of Python leave the topics out
            from pydoc_data.topics import topics

            for topic in sorted(topics):
                yield Document(f"help:{topic}", STDLIB, STDLIB, topics[topic].strip())
        return
    text = str(importlib.metadata.metadata(package.name).json.get("description", "")).strip()
    if len(text) >= _MIN_CHARACTERS and _is_unicode(text):
        yield Document("METADATA", package.name, package.name, text)


def _texts_of_file(path: Path) -> list[tuple[int, str]]:
    """Line number and text of every docstring, or the whole of a README; nothing where the file is unreadable."""
    try:
        content = path.read_bytes()
    except OSError:
        return []
    if path.suffix != ".py":
        text = content.decode(errors="replace").strip()
        return [(1, text)] if len(text) >= _MIN_CHARACTERS else []
    if b'"""' not in content and b"'''" not in content:
        return []
    try:
        tree = _parse(content)
        nodes = [tree, *_definitions(tree.body)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    texts = []
    for node in nodes:
        text = (ast.get_docstring(node) or "").strip()
        if len(text) >= _MIN_CHARACTERS and _is_unicode(text):
            texts.append((node.body[0].lineno, text))
    return texts


def _parse(content: bytes) -> ast.Module:
    """Parsing makes many objects and no garbage: without the collector it takes half the time (measured)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(content)
    finally:
        if collecting:
            gc.enable()


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Classes and functions in the order of their lines, nested ones and those under `if` and `try` included."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from _definitions(inner)
        for handler in getattr(node, "handlers", ()):
            yield from _definitions(handler.body)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold the text; a docstring may hold halves of surrogate pairs."""
    with contextlib.suppress(UnicodeEncodeError):
        text.encode()
        return True
    return False


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
