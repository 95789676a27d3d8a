"""The match index: which f-gram is the longest that ends at a position (paper, Algorithm 1).

Open addressing, exact, one memory-mapped file. The key of an n-gram is (id of its first n-1 tokens, its last
token), where the id of one token is itself and that of an f-gram is `token_vocab_size + rank`. So a match that
is one token longer costs one more probe, and because every prefix of the ranking is closed under sub-grams the
search grows from two tokens and stops at the first miss.

A key goes through an invertible mix. The place in the table gives its leading bits back; the slot keeps the
others, so keys are compared exactly although only 4 bytes of them are stored:

    slot, 64 bits = remainder of the mixed key | distance from its place + 1 | rank (32 bits);  0 = empty

Slots are kept in Robin Hood order (no entry is nearer to its place than the ones it passed), which ends a
search without a match after about 4 slots at the load of 0.85 where plain probing needs 23.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from scone.errors import CorruptArtifactError, IncompatibleArtifactError
from scone.match_kernels import INVALID, MISSING, REPEATED, STARTS, insert_rows, match_positions, match_step
from scone.storage import canonical_json

_MAGIC = b"SCONEMIX"
_FORMAT = 1
_HEADER_ALIGNMENT = 4096
_LOAD = 0.85
_MIN_DISTANCE_BITS = 12  # Robin Hood distances stay below 100 at this load


@dataclass(frozen=True, slots=True)
class Matches:
    """The longest f-gram that ends at each position; both arrays have the shape of the token ids."""

    length: np.ndarray
    """uint8, in tokens; 0 where nothing matches."""
    fgram_id: np.ndarray
    """int32; -1 where nothing matches."""


@dataclass(frozen=True, slots=True)
class _Geometry:
    """How many bits of a mixed key name the place and how many the slot keeps."""

    capacity: int
    token_bits: int
    key_bits: int
    high_bits: int
    remainder_bits: int

    @classmethod
    def choose(cls, num_fgrams: int, token_vocab_size: int, capacity: int = 0) -> _Geometry:
        token_bits = max(1, (token_vocab_size - 1).bit_length())
        key_bits = token_bits + (token_vocab_size + num_fgrams - 1).bit_length()
        high_bits = min(32, key_bits)
        # Few f-grams over a large vocabulary: more places, so that the remainder leaves room for the distance.
        place_bits = max(0, key_bits - (32 - _MIN_DISTANCE_BITS))
        capacity = max(capacity, int(num_fgrams / _LOAD) + 1, 1 << place_bits)
        keys_per_place = -(-(1 << high_bits) // capacity)
        remainder_bits = key_bits - high_bits + (keys_per_place - 1).bit_length()
        return cls(capacity, token_bits, key_bits, high_bits, remainder_bits)

    def numbers(self) -> tuple[int, ...]:
        return (self.capacity, self.token_bits, self.key_bits, self.high_bits, self.remainder_bits)


class MatchIndex:
    """Finds the longest f-gram that ends at each position, in a stream, a batch, or one decode step.

    Only the position and what lies to its left are read. Special ids belong to no f-gram, so they act as
    boundaries. `num_fgrams` of the methods uses the first ranks only, as if the others had never been kept.
    """

    def __init__(
        self,
        slots: np.ndarray,
        *,
        num_fgrams: int,
        max_fgram_length: int,
        token_vocab_size: int,
        special_ids: Sequence[int],
    ) -> None:
        """Made by `build` or `load`; `slots` is uint64 [capacity]."""
        self.num_fgrams = num_fgrams
        self.max_fgram_length = max_fgram_length
        self.token_vocab_size = token_vocab_size
        self.special_ids = tuple(special_ids)
        self._slots = slots.view(np.ndarray)
        self._slots.flags.writeable = False
        self._numbers = _Geometry.choose(num_fgrams, token_vocab_size, len(slots)).numbers()

    @property
    def num_bytes(self) -> int:
        """Bytes of the table, in memory or mapped."""
        return int(self._slots.nbytes)

    @classmethod
    def build(
        cls, tokens: np.ndarray, lengths: np.ndarray, *, token_vocab_size: int, special_ids: Sequence[int]
    ) -> MatchIndex:
        """The index of f-grams in rank order.

        Args:
            tokens: uint32 [S, K], left-aligned, zero-padded.
            lengths: uint8 [S].

        Raises:
            ValueError: A row is no f-gram (length, token id, special id), is there twice, or comes before one of
                its sub-grams.
        """
        return cls.build_in_pieces(
            [(tokens, lengths)],
            num_fgrams=len(tokens),
            max_fgram_length=tokens.shape[1],
            token_vocab_size=token_vocab_size,
            special_ids=special_ids,
        )

    @classmethod
    def build_in_pieces(
        cls,
        pieces: Iterable[tuple[np.ndarray, np.ndarray]],
        *,
        num_fgrams: int,
        max_fgram_length: int,
        token_vocab_size: int,
        special_ids: Sequence[int],
    ) -> MatchIndex:
        """Like `build`, from consecutive (tokens, lengths) of the ranking, so that only the table is in memory."""
        if not 0 <= num_fgrams < 1 << 31:
            raise ValueError(f"a match index holds up to 2^31 - 1 f-grams, got {num_fgrams:,}")
        geometry = _Geometry.choose(num_fgrams, token_vocab_size)
        slots = np.zeros(geometry.capacity, np.uint64)
        is_special = np.zeros(token_vocab_size, bool)
        is_special[list(special_ids)] = True
        rank = 0
        for tokens, lengths in pieces:
            if rank + len(tokens) > num_fgrams:
                raise ValueError(f"more f-grams than the announced {num_fgrams:,} were given to the match index")
            _check_rows(tokens, lengths, rank, is_special)
            row, problem = insert_rows(
                slots, geometry.numbers(), token_vocab_size, rank, np.ascontiguousarray(tokens, np.uint32), lengths
            )
            if problem:
                raise ValueError(_describe_problem(tokens[row, : lengths[row]], rank + row, problem))
            rank += len(tokens)
        if rank != num_fgrams:
            raise ValueError(f"{num_fgrams:,} f-grams were announced to the match index, {rank:,} given")
        return cls(
            slots,
            num_fgrams=num_fgrams,
            max_fgram_length=max_fgram_length,
            token_vocab_size=token_vocab_size,
            special_ids=special_ids,
        )

    def save(self, path: Path) -> None:
        """Write the index file (header, then slots) at `path`, replacing what is there."""
        with open(path, "wb") as file:
            self.write_to(file)

    def write_to(self, file: IO[bytes]) -> None:
        """Write the index into an open binary file."""
        header = canonical_json(
            {
                "format": _FORMAT,
                "num_fgrams": self.num_fgrams,
                "max_fgram_length": self.max_fgram_length,
                "token_vocab_size": self.token_vocab_size,
                "special_ids": list(self.special_ids),
                "capacity": len(self._slots),
            }
        )
        padding = -(len(_MAGIC) + 8 + len(header)) % _HEADER_ALIGNMENT
        file.write(_MAGIC + (len(header) + padding).to_bytes(8, "little") + header + b" " * padding)
        for start in range(0, len(self._slots), 1 << 20):
            file.write(self._slots[start : start + (1 << 20)].astype("<u8", copy=False).tobytes())

    @classmethod
    def load(cls, path: Path) -> MatchIndex:
        """Map an index file read-only; nothing is read until it is used.

        Raises:
            CorruptArtifactError: Not an index file, or truncated.
            IncompatibleArtifactError: Written in a format that this version does not know.
        """
        header, start = _read_header(path)
        slots = np.memmap(path, dtype="<u8", mode="r", offset=start, shape=(header.pop("capacity"),))
        return cls(slots, **header)

    def match_stream(
        self, token_ids: np.ndarray, offsets: np.ndarray | None = None, *, num_fgrams: int | None = None
    ) -> Matches:
        """Match a stream of documents; no match reaches over a document's start.

        Args:
            token_ids: uint32 [N].
            offsets: int64 [D + 1], document d is token_ids[offsets[d] : offsets[d + 1]]; None: one document.

        Raises:
            ValueError: A token id, the offsets, or `num_fgrams` is out of range.
        """
        flags = np.zeros(len(token_ids), np.uint8)
        if offsets is not None:
            if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(token_ids) or (np.diff(offsets) < 0).any():
                raise ValueError(f"document offsets must rise from 0 to the {len(token_ids):,} tokens of the stream")
            starts = offsets[:-1]
            flags[starts[starts < len(token_ids)]] = STARTS
        return self._match(token_ids, flags, num_fgrams)

    def match_batch(
        self, token_ids: np.ndarray, valid: np.ndarray | None = None, *, num_fgrams: int | None = None
    ) -> Matches:
        """Match each row of a padded batch on its own.

        Args:
            token_ids: integers [B, T].
            valid: bool [B, T]; false positions (padding) match nothing, and no match reaches over them.

        Raises:
            ValueError: A valid token id, the shape of `valid`, or `num_fgrams` is out of range.
        """
        flags = np.zeros(token_ids.shape, np.uint8)
        flags[:, :1] = STARTS
        if valid is not None:
            if valid.shape != token_ids.shape:
                raise ValueError(f"the mask has shape {valid.shape}, the token ids {token_ids.shape}")
            flags[~valid] = INVALID
            token_ids = np.where(valid, token_ids, 0)
        matches = self._match(token_ids.reshape(-1), flags.reshape(-1), num_fgrams)
        return Matches(matches.length.reshape(token_ids.shape), matches.fgram_id.reshape(token_ids.shape))

    def start(self) -> np.ndarray:
        """The state before the first token of a document, for `step`: int64 [K], plain data that may be copied."""
        return np.full(self.max_fgram_length, -1, np.int64)

    def step(self, state: np.ndarray, token_id: int, *, num_fgrams: int | None = None) -> tuple[int, int]:
        """(length, f-gram id) of the match that ends at the next token, (0, -1) for none; updates `state`.

        Raises:
            ValueError: The token id, or `num_fgrams`, is out of range.
        """
        if not 0 <= token_id < self.token_vocab_size:
            raise ValueError(_out_of_range(token_id, self.token_vocab_size))
        limit = self._limit(num_fgrams)
        length, fgram_id = match_step(self._slots, self._numbers, self.token_vocab_size, limit, state, token_id)
        return int(length), int(fgram_id)

    def _match(self, token_ids: np.ndarray, flags: np.ndarray, num_fgrams: int | None) -> Matches:
        if token_ids.size:
            low, high = int(token_ids.min()), int(token_ids.max())
            if low < 0 or high >= self.token_vocab_size:
                raise ValueError(_out_of_range(low if low < 0 else high, self.token_vocab_size))
        length = np.zeros(len(token_ids), np.uint8)
        fgram_id = np.full(len(token_ids), -1, np.int32)
        limit = self._limit(num_fgrams)
        tokens = np.ascontiguousarray(token_ids, np.uint32)
        vocab_size = self.token_vocab_size
        match_positions(
            self._slots, self._numbers, vocab_size, self.max_fgram_length, limit, tokens, flags, length, fgram_id
        )
        return Matches(length, fgram_id)

    def _limit(self, num_fgrams: int | None) -> int:
        if num_fgrams is None:
            return self.num_fgrams
        if not 0 <= num_fgrams <= self.num_fgrams:
            raise ValueError(
                f"num_fgrams must lie between 0 and the {self.num_fgrams:,} of the index, got {num_fgrams:,}"
            )
        return num_fgrams


def _out_of_range(token_id: int, token_vocab_size: int) -> str:
    return f"token id {token_id} is outside the vocabulary of {token_vocab_size:,} tokens; is it another tokenizer?"


def _check_rows(tokens: np.ndarray, lengths: np.ndarray, first_rank: int, is_special: np.ndarray) -> None:
    inside = np.arange(tokens.shape[1]) < lengths[:, None]
    wrong = (lengths < 2) | (lengths > tokens.shape[1]) | ((tokens >= len(is_special)) & inside).any(axis=1)
    wrong |= (is_special[np.minimum(tokens, len(is_special) - 1)] & inside).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"the f-gram of rank {first_rank + row:,} is {tokens[row, : lengths[row]].tolist()}: expected 2 to "
            f"{tokens.shape[1]} token ids below {len(is_special):,} without special ids"
        )


def _describe_problem(ngram: np.ndarray, rank: int, problem: int) -> str:
    name = f"the f-gram {ngram.tolist()} of rank {rank:,}"
    if problem == MISSING:
        return f"{name} comes before one of its sub-grams, or without it: not a ranking by count; count anew"
    if problem == REPEATED:
        return f"{name} is there twice"
    return f"{name} finds no place near its own in the match index"


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    found_bytes = os.path.getsize(path)
    with open(path, "rb") as file:
        magic, length = file.read(len(_MAGIC)), int.from_bytes(file.read(8), "little")
        if magic != _MAGIC:
            raise CorruptArtifactError(f"{path} is not a match index (it starts with {magic!r}); build it anew")
        content = file.read(min(length, found_bytes))
    start = len(_MAGIC) + 8 + length
    try:
        header = json.loads(content)
    except ValueError as error:
        raise CorruptArtifactError(f"{path} has a broken header ({error}); restore it or build it anew") from error
    if header.pop("format") != _FORMAT:
        raise IncompatibleArtifactError(f"{path} has another match index format, expected {_FORMAT}; build it anew")
    expected = start + 8 * header["capacity"]
    if found_bytes != expected:
        raise CorruptArtifactError(
            f"{path} holds {found_bytes:,} bytes, expected {expected:,}; restore it or build anew"
        )
    return header, start
