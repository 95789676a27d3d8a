"""Tokenizing from and to a real S3 server, through the command line and in a Ray of its own."""

import json
import os
import subprocess
import sys

import pytest

from scone.artifacts import verify_files
from scone.corpus import ReadSettings, group_parts, list_parts, read_part
from scone.errors import CorpusError
from scone.storage import Folder
from scone.tokenizer import TokenizerFile
from scone.tokens import load_tokens, read_documents

TEXTS = [f"Document number {number} says that {number * number} is a square." for number in range(80)]


def _write_corpus(bucket: str) -> None:
    folder = Folder(f"{bucket}/corpus")
    for name, texts in (("a", TEXTS[:50]), ("deep/b", [*TEXTS[50:], TEXTS[0]])):
        folder.write_bytes(f"{name}.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def test_globs_folders_and_ranges_work_on_s3(s3_bucket: str) -> None:
    _write_corpus(s3_bucket)
    names = [f"{s3_bucket}/corpus/a.jsonl", f"{s3_bucket}/corpus/deep/b.jsonl"]
    assert [part.source for part in list_parts([f"{s3_bucket}/corpus"])] == names
    assert [part.source for part in list_parts([f"{s3_bucket}/corpus/**/*.jsonl"])] == names
    assert [part.source for part in list_parts([names[1]])] == names[1:]
    groups = group_parts(list_parts([f"{s3_bucket}/corpus"]), unit_bytes=500)
    texts = [document.text for group in groups for part in group for document in read_part(part, ReadSettings())]
    assert len(groups) > 5
    assert texts == [*TEXTS, TEXTS[0]]


def test_nothing_on_s3_is_an_error_with_the_uri(s3_bucket: str) -> None:
    with pytest.raises(CorpusError, match=rf"nothing at {s3_bucket}/none/\*\.parquet"):
        list_parts([f"{s3_bucket}/none/*.parquet"])


def test_command_tokenizes_from_s3_to_s3_and_again_does_nothing(s3_bucket: str) -> None:
    _write_corpus(s3_bucket)
    settings = {"corpus": f"{s3_bucket}/corpus", "heldout_fraction": 0.2, "train_vocab_size": 300, "unit_bytes": 1500}
    overrides = [item for key, value in settings.items() for item in ("--set", f"tokenize.{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "scone", "tokenize", "--output", f"{s3_bucket}/run", "--set", "tracking=false"]
    for expected in ("tokenize: started", "is already complete"):
        done = subprocess.run([*command, *overrides], capture_output=True, text=True, env=os.environ.copy())
        assert done.returncode == 0, done.stderr
        assert expected in done.stderr
        assert done.stdout.splitlines()[-1] == f"{s3_bucket}/run/tokens"
    folder = Folder(f"{s3_bucket}/run/tokens")
    tokens = load_tokens(folder)
    verify_files(folder, tokens.manifest)
    tokenizer = TokenizerFile(folder.read_bytes("tokenizer.json"), "<|endoftext|>").tokenizer
    texts = []
    for shard in (*tokens.shards["train"], *tokens.shards["heldout"]):
        documents = read_documents(folder, shard.entry)
        bounds = zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
        texts += [tokenizer.decode(documents.token_ids[start:stop].tolist()) for start, stop in bounds]
    assert sorted(texts) == sorted(TEXTS)
    assert tokens.manifest.statistics["duplicates"] == 1
    assert {"manifest.json", "provenance.json", "tokenizer.json"} <= set(folder.list_files())
    assert not [path for path in folder.list_files() if path.startswith("_work")]
