"""Finished artifacts of a tiny run, built directly: what the later stages read, in a second."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig

from scone.artifacts import ArtifactBuilder, Manifest
from scone.fgrams import FGrams, rank_order, write_fgrams
from scone.matching import MatchIndex
from scone.models import SconeConfig, SconeForCausalLM
from scone.sequences import cut_to_sequence, write_sequences
from scone.storage import FileEntry, Folder

VOCAB_SIZE = 50
END_OF_TEXT = 0
MAX_FGRAM_LENGTH = 4
WIDTH = 16
SEQUENCE_LENGTH = 24
TOKENIZER = "f" * 64


def random_stream(seed: int, num_tokens: int = 4000) -> NDArray[np.int64]:
    """Tokens in which some follow others more often than chance, with an end of text every 100 or so."""
    random = np.random.default_rng(seed)
    frequency = 1 / np.arange(1, VOCAB_SIZE)
    tokens = 1 + random.choice(VOCAB_SIZE - 1, num_tokens, p=frequency / frequency.sum())
    repeats = random.random(num_tokens) < 0.5
    for position in np.flatnonzero(repeats[1:]) + 1:
        tokens[position] = tokens[position - 1] * 7 % (VOCAB_SIZE - 1) + 1
    tokens[random.random(num_tokens) < 0.01] = END_OF_TEXT
    return tokens


def most_frequent_fgrams(stream: NDArray[np.int64], num_fgrams: int) -> FGrams:
    """The first ranks, counted in plain Python."""
    counts: Counter[tuple[int, ...]] = Counter()
    for n in range(2, MAX_FGRAM_LENGTH + 1):
        windows = np.lib.stride_tricks.sliding_window_view(stream, n)
        counts.update(tuple(window) for window in windows[(windows != END_OF_TEXT).all(axis=1)].tolist())
    tokens = np.zeros((len(counts), MAX_FGRAM_LENGTH), np.uint32)
    for row, ngram in enumerate(counts):
        tokens[row, : len(ngram)] = ngram
    lengths = np.array([len(ngram) for ngram in counts], np.uint8)
    every = FGrams(tokens, lengths, np.array(list(counts.values()), np.int64))
    return every.take(rank_order(every)[:num_fgrams])


def match_index_of(fgrams: FGrams) -> MatchIndex:
    return MatchIndex.build(fgrams.tokens, fgrams.lengths, token_vocab_size=VOCAB_SIZE, special_ids=(END_OF_TEXT,))


def tiny_model(seed: int = 0, *, with_fgrams: bool = True, fusion: str = "add") -> SconeForCausalLM:
    """Random weights, large enough that every f-gram's vector is another."""
    size: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(seed)
    fgrams: dict[str, Any] = {"fgram_config": LlamaConfig(**size), "max_fgram_length": MAX_FGRAM_LENGTH}
    config = SconeConfig(LlamaConfig(**size), fusion=fusion, residual_init="normal", **(fgrams if with_fgrams else {}))
    return SconeForCausalLM(config).eval()


def write_run(run: Folder, num_fgrams: int = 600) -> None:
    """tokens, fgrams, sequences and both models of a run."""
    streams = {"train": random_stream(0), "heldout": random_stream(1)}
    fgrams = most_frequent_fgrams(streams["train"], num_fgrams)
    index = match_index_of(fgrams)
    tokens = _write_tokens(run / "tokens", streams)
    vocabulary = _write_fgrams(run / "fgrams", tokens, fgrams, index)
    sequences = _write_sequences(run / "sequences", tokens, vocabulary, streams, index)
    write_model(run / "model/scone", sequences, tiny_model(), final_loss=3.0)
    write_model(run / "model/baseline", sequences, tiny_model(with_fgrams=False), final_loss=3.2)


def write_model(folder: Folder, sequences: Manifest, model: SconeForCausalLM, final_loss: float) -> Manifest:
    builder = ArtifactBuilder(
        folder,
        kind="model",
        format=1,
        config={"final_loss": final_loss},
        inputs={"sequences": sequences},
        tokenizer_fingerprint=TOKENIZER,
    )
    builder.claim()
    model.save_pretrained(folder.uri)
    losses = np.linspace(4, final_loss, 20)
    steps = [{"step": i, "tokens": 100 * i, "loss": loss, "learning_rate": 1e-3} for i, loss in enumerate(losses)]
    folder.write_bytes("metrics.jsonl", "".join(json.dumps(step) + "\n" for step in steps).encode())
    names = [name for name in folder.list_files() if not name.startswith("_work")]
    return builder.publish([folder.describe_file(name) for name in names], {}, {"seconds": 12.5, "measured": {}})


def _write_tokens(folder: Folder, streams: Mapping[str, NDArray[np.int64]]) -> Manifest:
    splits = {}
    for split, stream in streams.items():
        ends = int((stream == END_OF_TEXT).sum())
        splits[split] = {"documents": ends, "tokens": len(stream) - ends, "bytes": 3 * len(stream)}
    return _publish(folder, "tokens", {}, [folder.write_bytes("tokenizer.json", b"{}")], splits)


def _write_fgrams(folder: Folder, tokens: Manifest, fgrams: FGrams, index: MatchIndex) -> Manifest:
    scratch = Path(folder.uri)
    scratch.mkdir(parents=True)
    index.save(scratch / "match_index.bin")
    files = [write_fgrams(folder, "ranked/00000.parquet", fgrams), folder.describe_file("match_index.bin")]
    statistics = {
        "num_fgrams": len(fgrams),
        "max_fgram_length": MAX_FGRAM_LENGTH,
        "token_vocab_size": VOCAB_SIZE,
        "special_ids": [END_OF_TEXT],
    }
    return _publish(folder, "fgrams", {"tokens": tokens}, files, statistics)


def _write_sequences(
    folder: Folder,
    tokens: Manifest,
    fgrams: Manifest,
    streams: Mapping[str, NDArray[np.int64]],
    index: MatchIndex,
) -> Manifest:
    files: list[FileEntry] = []
    for split, stream in streams.items():
        starts = np.arange(0, len(stream) - SEQUENCE_LENGTH, SEQUENCE_LENGTH)
        windows = stream[starts[:, None] + np.arange(SEQUENCE_LENGTH + 1)]
        lengths = index.match_stream(stream).length[starts[:, None] + np.arange(SEQUENCE_LENGTH + 1)]
        files += write_sequences(folder, split, 0, windows, cut_to_sequence(lengths), VOCAB_SIZE)
    statistics = {
        "sequence_length": SEQUENCE_LENGTH,
        "token_vocab_size": VOCAB_SIZE,
        "max_fgram_length": MAX_FGRAM_LENGTH,
    }
    return _publish(folder, "sequences", {"tokens": tokens, "fgrams": fgrams}, files, statistics)


def _publish(
    folder: Folder, kind: str, inputs: Mapping[str, Manifest], files: list[FileEntry], statistics: Mapping[str, Any]
) -> Manifest:
    builder = ArtifactBuilder(
        folder, kind=kind, format=1, config=dict(statistics), inputs=inputs, tokenizer_fingerprint=TOKENIZER
    )
    builder.claim()
    return builder.publish(files, statistics, {})
