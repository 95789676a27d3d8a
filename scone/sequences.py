"""The sequences artifact: fixed-length training sequences with a match length per token, and its reader.

    SPLIT/tokens-NNNNN.bin     [n, L + 1] uint16 (uint32 from 65,537 token ids on), little endian
    SPLIT/lengths-NNNNN.bin    [n, L + 1] uint8: length of the longest f-gram that ends here, 0 where none

The stream of a split is each document followed by the end-of-text token. Sequence s holds its tokens
[s * L, s * L + L]: L inputs and one more target, which is the first input of the next sequence. Match lengths
never reach over the start of the sequence or of the document.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scone.artifacts import Manifest, load_manifest
from scone.errors import CorruptArtifactError, MissingArtifactError
from scone.storage import FileEntry, Folder

SEQUENCES_KIND = "sequences"
SEQUENCES_FORMAT = 1

Int64Array = npt.NDArray[np.int64]


def token_dtype(token_vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """How token ids are stored: two bytes while they fit."""
    return np.dtype("<u2") if token_vocab_size <= 1 << 16 else np.dtype("<u4")


def cut_to_sequence(match_length: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Match lengths [n, T] without what lies before the start of each row.

    The longest f-gram inside the row is the cut match: every suffix of an f-gram, down to two tokens, is
    an f-gram, since it is never rarer than the f-gram itself.
    """
    positions = np.arange(1, match_length.shape[1] + 1)
    cut = np.minimum(match_length, np.minimum(positions, 255).astype(np.uint8))
    cut[cut == 1] = 0
    return cut


def write_sequences(
    folder: Folder,
    split: str,
    shard: int,
    token_ids: npt.NDArray[np.unsignedinteger],
    match_length: npt.NDArray[np.uint8],
    token_vocab_size: int,
) -> tuple[FileEntry, FileEntry]:
    """Publish one shard of a split from `token_ids` and `match_length`, both [n, L + 1].

    Raises:
        ValueError: The two have different shapes.
    """
    if token_ids.shape != match_length.shape:
        raise ValueError(f"token ids have shape {token_ids.shape}, match lengths {match_length.shape}")
    columns = {
        "tokens": np.ascontiguousarray(token_ids, dtype=token_dtype(token_vocab_size)),
        "lengths": np.ascontiguousarray(match_length, dtype=np.uint8),
    }
    rows = len(token_ids)
    written = [
        folder.write_bytes(f"{split}/{name}-{shard:05d}.bin", array.tobytes()) for name, array in columns.items()
    ]
    tokens, lengths = (replace(entry, rows=rows) for entry in written)
    return tokens, lengths


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Some sequences, ready to be made into tensors."""

    token_ids: Int64Array
    """[B, L + 1] int64: inputs are [:, :-1], targets [:, 1:]."""
    match_length: npt.NDArray[np.uint8]
    """[B, L + 1] uint8, 0 where no f-gram ends."""


class SequenceReader:
    """Random access to the sequences of one split, through memory maps."""

    def __init__(self, folder: Folder, split: str, manifest: Manifest) -> None:
        """Use `SequenceReader.open`."""
        self.manifest = manifest
        self.split = split
        try:
            self.sequence_length = int(manifest.statistics["sequence_length"])
            self.token_vocab_size = int(manifest.statistics["token_vocab_size"])
            self.max_fgram_length = int(manifest.statistics["max_fgram_length"])
        except KeyError as error:
            raise CorruptArtifactError(
                f"the manifest of {folder} does not say {error}, which every sequences artifact has; "
                'rebuild it with "scone pack"'
            ) from error
        self._dtype = token_dtype(self.token_vocab_size)
        self._folder = folder
        self._tokens = manifest.files_below(f"{split}/tokens-")
        self._lengths = manifest.files_below(f"{split}/lengths-")
        self._check_files()
        self._starts = np.cumsum([0] + [entry.rows for entry in self._tokens], dtype=np.int64)
        self._maps: dict[str, npt.NDArray[np.generic]] = {}

    @classmethod
    def open(cls, folder: Folder, split: str, tokenizer_fingerprint: str | None = None) -> SequenceReader:
        """A reader of `split` ("train" or "heldout").

        Raises:
            MissingArtifactError: No finished sequences there, or none of that split.
            IncompatibleArtifactError: Another kind, format or tokenizer.
            CorruptArtifactError: A file is missing, truncated or of another shape than the manifest says.
        """
        manifest = load_manifest(folder, SEQUENCES_KIND, SEQUENCES_FORMAT, tokenizer_fingerprint)
        reader = cls(folder, split, manifest)
        if reader.num_sequences == 0:
            found = sorted({entry.path.partition("/")[0] for entry in manifest.files})
            raise MissingArtifactError(
                f"{folder} holds no sequences of split {split!r}, only of {', '.join(found) or 'none'}; "
                "pack more text, or with a smaller pack.sequence_length"
            )
        return reader

    @property
    def num_sequences(self) -> int:
        return int(self._starts[-1])

    def read(self, indices: npt.ArrayLike) -> SequenceBatch:
        """Sequences by index [B] int64, each in [0, num_sequences), in the order given.

        Raises:
            IndexError: An index is out of range.
        """
        wanted: Int64Array = np.asarray(indices, dtype=np.int64)
        outside = wanted[(wanted < 0) | (wanted >= self.num_sequences)]
        if len(outside):
            raise IndexError(f"sequence {outside[0]:,} of {self.num_sequences:,} in split {self.split!r}")
        shape = (len(wanted), self.sequence_length + 1)
        batch = SequenceBatch(np.empty(shape, np.int64), np.empty(shape, np.uint8))
        shards = np.searchsorted(self._starts, wanted, side="right") - 1
        for shard in np.unique(shards):
            rows = np.flatnonzero(shards == shard)
            local = wanted[rows] - self._starts[shard]
            batch.token_ids[rows] = self._map(self._tokens[shard], self._dtype)[local]
            batch.match_length[rows] = self._map(self._lengths[shard], np.dtype(np.uint8))[local]
        return batch

    def _map(self, entry: FileEntry, dtype: np.dtype) -> npt.NDArray[np.generic]:
        if entry.path not in self._maps:
            path = self._folder.local_path(entry)
            shape = (entry.rows, self.sequence_length + 1)
            self._maps[entry.path] = np.memmap(path, dtype=dtype, mode="r", shape=shape)
        return self._maps[entry.path]

    def _check_files(self) -> None:
        rows = [[entry.rows for entry in entries] for entries in (self._tokens, self._lengths)]
        if rows[0] != rows[1]:
            raise CorruptArtifactError(
                f"{self._folder}: split {self.split!r} has token shards of {rows[0]} sequences and length shards "
                f'of {rows[1]}; restore it, or rebuild it with "scone pack"'
            )
        width = self.sequence_length + 1
        for entries, item_bytes in ((self._tokens, self._dtype.itemsize), (self._lengths, 1)):
            for entry in entries:
                if entry.num_bytes != entry.rows * width * item_bytes:
                    raise CorruptArtifactError(
                        f"{self._folder.locate(entry.path)} holds {entry.num_bytes:,} bytes; {entry.rows:,} sequences "
                        f'of {width:,} tokens need {entry.rows * width * item_bytes:,}; rebuild it with "scone pack"'
                    )


class SequenceOrder:
    """Which sequences each training step reads: every sequence once per epoch, in an order of its own.

    A function of (seed, step) alone. It does not know how many workers there are, and needs no memory and no
    preparation, however many sequences: a step costs the size of its batch. The shuffle is a Feistel
    network of integer arithmetic, walked until it falls into range, so it is the same with every library version.
    """

    def __init__(self, num_sequences: int, seed: int, global_batch_size: int) -> None:
        """Raises ValueError where a number is not positive, or the seed is negative."""
        if num_sequences < 1 or global_batch_size < 1 or seed < 0:
            raise ValueError(
                "num_sequences and global_batch_size must be at least 1 and seed at least 0, "
                f"got {num_sequences}, {global_batch_size} and {seed}"
            )
        self.num_sequences = num_sequences
        self.seed = seed
        self.global_batch_size = global_batch_size
        self._half_bits = max(2, -(-(num_sequences - 1).bit_length() // 2))

    def indices(self, step: int) -> Int64Array:
        """Sequences of one global step [global_batch_size] int64; a batch may span two epochs.

        Worker r of W takes its part of this array, in micro-batches as it likes.
        """
        positions = np.arange(step * self.global_batch_size, (step + 1) * self.global_batch_size, dtype=np.int64)
        epochs, within = np.divmod(positions, self.num_sequences)
        result = np.empty_like(within)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            result[rows] = self._shuffle(within[rows], int(epoch))
        return result

    def epoch_of(self, step: int) -> float:
        """How often the data has been read before this step."""
        return step * self.global_batch_size / self.num_sequences

    def _shuffle(self, positions: Int64Array, epoch: int) -> Int64Array:
        keys = _round_keys(self.seed, epoch)
        values = self._feistel(positions.astype(np.uint64), keys)
        while (outside := values >= self.num_sequences).any():
            values[outside] = self._feistel(values[outside], keys)
        return values.astype(np.int64)

    def _feistel(self, values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        shift, mask = np.uint64(self._half_bits), np.uint64((1 << self._half_bits) - 1)
        left, right = values >> shift, values & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        return (left << shift) | right


_NUM_ROUNDS = 8


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    state: npt.NDArray[np.uint64] = _mix(np.array([seed & (2**64 - 1)], dtype=np.uint64)) + np.uint64(epoch)
    rounds: npt.NDArray[np.uint64] = np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64)
    return _mix(_mix(state) + rounds)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64: every input bit changes half of the output bits. Wraps around on purpose."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
