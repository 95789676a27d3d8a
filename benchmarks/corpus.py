"""Builds the corpus of the benchmarks: real text from Debian's documentation packages, as tokens artifacts.

    python -m benchmarks.corpus OUTPUT                    32,000 tokens of byte-level BPE
    python -m benchmarks.corpus OUTPUT --vocab 131072     the same text with another vocabulary

Needs a Debian machine with `apt-get` (packages are downloaded and unpacked, never installed), about 2 GB of disk
and, on two quiet cores, 10 minutes. The packages are on every Debian mirror, so anyone can make the same kind of
corpus; a release that lacks one of them goes without it, and says so. Nothing of it belongs into the repository.

Writes OUTPUT/harvest (documents by package), OUTPUT/text (all documents, shuffled) and OUTPUT/vocab-V/tokens (the
artifact of `scone tokenize`, which also drops duplicates). What is complete is not made again. Prints the number
of training tokens.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from scone.storage import Folder
from scone.tokens import TokensInfo, load_tokens

MIB = 1 << 20

# Package and the most text to take from it, in MiB: prose, manuals and references of many projects, so that no one
# of them decides the counts.
PACKAGES = {
    "linux-source-6.1": 60,
    "openjdk-17-doc": 30,
    "linux-doc-6.1": 40,
    "dict-gcide": 40,
    "dict-wn": 30,
    "rust-doc": 30,
    "sagemath-doc": 24,
    "vtk9-doc": 16,
    "wx3.2-doc": 16,
    "libstdc++-12-doc": 12,
    "opencv-doc": 12,
    "cppreference-doc-en-html": 20,
    "python3.11-doc": 20,
    "anarchism": 20,
    "ada-reference-manual-2012": 12,
    "python-pandas-doc": 14,
    "python-scipy-doc": 14,
    "qtbase5-doc-html": 12,
    "libreoffice-help-en-us": 14,
    "postgresql-doc-15": 12,
    "sqlite3-doc": 14,
    "racket-doc": 12,
    "erlang-doc": 12,
    "lilypond-doc-html": 12,
    "libboost1.81-doc": 12,
    "libxcb-doc": 6,
    "libeigen3-doc": 8,
    "openfoam": 8,
    "gap-doc": 8,
    "python-sklearn-doc": 10,
    "python-astropy-doc": 10,
    "python-statsmodels-doc": 10,
    "python-sympy-doc": 10,
    "python-django-doc": 10,
    "python-sqlalchemy-doc": 10,
    "libgtk-3-doc": 10,
    "libglib2.0-doc": 10,
    "emacs-common": 12,
    "perl-doc": 10,
    "git-doc": 10,
    "debian-handbook": 10,
    "manpages": 10,
    "manpages-dev": 10,
    "manpages-posix": 6,
    "ruby3.1-doc": 10,
    "llvm-14-doc": 10,
    "ghc-doc": 10,
    "bible-kjv-text": 8,
    "dict-foldoc": 8,
    "nodejs-doc": 8,
    "dpdk-doc": 8,
    "cmake-doc": 8,
    "apache2-doc": 8,
    "maxima-doc": 8,
    "gnucash-docs": 8,
    "mate-user-guide": 8,
    "vim-runtime": 8,
    "octave-doc": 6,
    "zsh-doc": 6,
    "gimp-help-en": 6,
    "installation-guide-amd64": 6,
    "nova-doc": 6,
    "neutron-doc": 6,
    "cinder-doc": 6,
    "twisted-doc": 6,
    "fortunes": 4,
    "debian-policy": 4,
    "developers-reference": 4,
    "debian-reference-en": 4,
    "gnuplot-doc": 4,
    "bind9-doc": 4,
    "postfix-doc": 4,
    "keystone-doc": 4,
    "swift-doc": 4,
    "heat-doc": 4,
    "tcl8.6-doc": 4,
    "glibc-doc": 4,
    "scilab-doc": 4,
    "subversion": 2,
    "jargon-text": 2,
    "debian-faq": 2,
    "binutils-doc": 2,
}

SEED = 7
MIN_DOCUMENT_CHARACTERS = 400
MAX_DOCUMENT_CHARACTERS = 400_000
DICTIONARY_CHARACTERS = 20_000
TEXT_FILE_BYTES = 16 * MIB
TOKENIZER_SAMPLE_BYTES = 48 * MIB
WANTED_TRAINING_TOKENS = 100_000_000

_MARKUP = (".html", ".htm", ".xhtml", ".page", ".xml", ".docbook")
_PLAIN = (".txt", ".rst", ".md", ".py", ".c", ".h", ".pod", ".el", ".texi", ".rawtext")
_DROPPED = re.compile(r"<(script|style|head|nav|svg)\b.*?</\1\s*>|<!--.*?-->", re.DOTALL | re.IGNORECASE)
_BLOCK_TAG = re.compile(r"</?(?:p|div|br|li|tr|h[1-6]|pre|table|d[td]|section|title|para)\b[^>]*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z!?][^<>]{0,4000}>")
_SPACES = re.compile(r"[ \t\xa0]+")
_EMPTY_LINES = re.compile(r"\n\s*\n\s*\n+")
_MAN_PAGE = re.compile(r"/man/man\d/[^/]*$")
_TROFF = re.compile(r'^(?:\.\\".*|\.[A-Za-z]{1,2}\b ?)|\\f[BIRP]|\\&', re.MULTILINE)

_SCHEMA = pa.schema([("source", pa.string()), ("path", pa.string()), ("text", pa.large_string())])


@dataclass(frozen=True, slots=True)
class PackageDocuments:
    """The documents of one package, up to `max_bytes` of text."""

    package: str
    max_bytes: int

    def harvest(self, folder: Path) -> str:
        """Write `folder`/PACKAGE.parquet unless it is there; returns a line that says what came of it."""
        target = folder / f"{self.package}.parquet"
        if target.exists():
            return f"{self.package}: harvested before"
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"{self.package}-") as work:
            try:
                self._unpack(Path(work))
            except (subprocess.CalledProcessError, OSError) as error:
                return f"{self.package}: skipped ({error})"
            rows = list(self._documents(Path(work)))
            temporary = Path(work) / "documents"
            columns: list[list[str]] = [list(column) for column in zip(*rows, strict=True)] or [[], []]
            table = pa.table([[self.package] * len(rows), *columns], schema=_SCHEMA)
            pq.write_table(table, temporary, compression="zstd")
            temporary.rename(target)
        return f"{self.package}: {len(rows):,} documents, {sum(len(row[1]) for row in rows) / MIB:.1f} M characters"

    def _unpack(self, work: Path) -> None:
        run = partial(subprocess.run, check=True, cwd=work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        run(["apt-get", "download", "-q", self.package])
        archive = next(work.glob("*.deb"))
        run(["dpkg-deb", "-x", archive.name, "files"])
        archive.unlink()
        for sources in work.glob("files/usr/src/*.tar.xz"):  # the kernel's: prose is in its comments
            parts = [f"*/{name}/*" for name in ("kernel", "mm", "fs", "net", "block", "lib", "security")]
            run(["tar", "-xJf", str(sources), "-C", "files", "--wildcards", *parts])

    def _documents(self, work: Path) -> Iterator[tuple[str, str]]:
        """(path, text) in an order that only names decide, until there is enough."""
        root = work / "files"
        files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
        names = sorted((str(path.relative_to(root)) for path in files), key=_order_of)
        size = 0
        for name in names:
            for number, text in enumerate(_read_texts(root / name)):
                if len(text) < MIN_DOCUMENT_CHARACTERS or text.count("\ufffd") > len(text) // 100:
                    continue
                text = text[:MAX_DOCUMENT_CHARACTERS]
                yield f"{name}#{number}", text
                size += len(text)
                if size >= self.max_bytes:
                    return


def _order_of(name: str) -> bytes:
    return hashlib.sha1(f"{SEED} {name}".encode()).digest()


def _read_texts(path: Path) -> list[str]:
    """The documents in one file; none if it is not text that we know."""
    name = path.as_posix().lower()
    is_dictionary = name.endswith(".dict.dz")
    plain_name = name.removesuffix(".gz")
    is_fortune = "/games/fortunes/" in name and "." not in path.name
    is_man_page = bool(_MAN_PAGE.search(plain_name))
    if not (is_dictionary or is_fortune or is_man_page or plain_name.endswith(_MARKUP + _PLAIN)):
        return []
    opener = gzip.open if name.endswith((".gz", ".dz")) else open
    try:
        with opener(path, "rb") as file:
            content = file.read(64 * MIB)
    except (OSError, EOFError):
        return []
    if b"\0" in content[:4096]:
        return []
    text = content.decode("utf-8", "replace")
    if is_dictionary:
        return [text[i : i + DICTIONARY_CHARACTERS] for i in range(0, len(text), DICTIONARY_CHARACTERS)]
    if is_man_page:
        return [_TROFF.sub("", text).replace("\\-", "-")]
    return [_strip_markup(text)] if plain_name.endswith(_MARKUP) else [text]


def _strip_markup(text: str) -> str:
    text = _DROPPED.sub(" ", text[: 8 * MAX_DOCUMENT_CHARACTERS])
    text = _TAG.sub("", _BLOCK_TAG.sub("\n", text))
    return _EMPTY_LINES.sub("\n\n", _SPACES.sub(" ", html.unescape(text))).strip()


def harvest_packages(output: Path) -> None:
    """OUTPUT/harvest/PACKAGE.parquet of every package that the mirror has."""
    folder = output / "harvest"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("*-*/"):
        shutil.rmtree(leftover)
    jobs = [PackageDocuments(package, limit * MIB) for package, limit in PACKAGES.items()]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for line in pool.map(partial(PackageDocuments.harvest, folder=folder), jobs):
            print(f"  {line}", flush=True)


def shuffle_documents(output: Path) -> Path:
    """OUTPUT/text, all documents in an order that a seed decides: a prefix is a fair smaller corpus."""
    target = output / "text"
    if target.exists():
        return target
    harvested = [pq.read_table(path) for path in sorted((output / "harvest").glob("*.parquet"))]
    table = pa.concat_tables(harvested).combine_chunks()
    order = np.random.default_rng(SEED).permutation(len(table))
    sizes = np.asarray(pc.binary_length(table["text"]))[order]
    files = np.cumsum(sizes) // TEXT_FILE_BYTES
    starts = [*np.flatnonzero(np.diff(files, prepend=-1)).tolist(), len(order)]
    temporary = output / "text.partial"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for number, (start, stop) in enumerate(pairwise(starts)):
        rows = table.take(pa.array(order[start:stop]))
        pq.write_table(rows, temporary / f"{number:05d}.parquet", compression="zstd")
    temporary.rename(target)
    print(f"{len(table):,} documents, {int(sizes.sum()) / MIB:,.0f} MiB of text", flush=True)
    return target


def tokenize(output: Path, text: Path, token_vocab_size: int) -> TokensInfo:
    """OUTPUT/vocab-V/tokens, made by the project's own stage."""
    from pipelines import tokenize as stage
    from pipelines.stage import StageContext

    folder = Folder(output / f"vocab-{token_vocab_size}")
    config = stage.TokenizeConfig(
        corpus=(str(text),),
        train_vocab_size=token_vocab_size,
        tokenizer_sample_bytes=TOKENIZER_SAMPLE_BYTES,
        unit_bytes=TEXT_FILE_BYTES // 4,  # compressed: one file of text is one unit, and so one token shard
    )
    stage.run(config, StageContext(run_folder=folder, show_progress=False))
    return load_tokens(folder / "tokens")


def build(output: Path, token_vocab_size: int) -> TokensInfo:
    """The tokens artifact of one vocabulary; what is there already is kept."""
    if not (output / "text").exists():
        harvest_packages(output)
    return tokenize(output, shuffle_documents(output), token_vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="folder outside the repository")
    parser.add_argument("--vocab", type=int, default=32_000, help="tokens of the byte-level BPE")
    arguments = parser.parse_args()
    output = arguments.output.resolve()
    if output.is_relative_to(Path(__file__).resolve().parents[1]):
        sys.exit(f"{output} lies in the repository; choose a folder outside it")
    if not (output / "text").exists() and shutil.which("apt-get") is None:
        sys.exit("this needs a Debian machine: there is no apt-get here")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    tokens = build(output, arguments.vocab)
    found = tokens.num_tokens("train")
    print(f"{found:,} training tokens in {tokens.num_documents('train'):,} documents, {tokens.folder}")
    if found < WANTED_TRAINING_TOKENS:
        print(f"fewer than the {WANTED_TRAINING_TOKENS:,} of the largest benchmark: the mirror lacks packages")


if __name__ == "__main__":
    main()
