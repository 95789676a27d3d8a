"""The f-gram vocabulary: the fgrams artifact by rank, and its match index.

    ranked/NNNNN.parquet    columns tokens (list<uint32>), count (int64); rank order over all files
    match_index.bin         finds an f-gram by its tokens

Rank order is count descending, then length, then token ids ascending. A sub-gram is never rarer than what
contains it, so every prefix of the ranking is closed under sub-grams. The rank of an f-gram is its id, and its
row in the embedding table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scone.artifacts import Manifest, load_manifest
from scone.errors import CorruptArtifactError
from scone.fgrams import FGrams, read_fgrams
from scone.storage import Folder

if TYPE_CHECKING:
    from scone.matching import MatchIndex

FGRAMS_KIND = "fgrams"
FGRAMS_FORMAT = 1
MATCH_INDEX_FILE = "match_index.bin"
RANKED_FOLDER = "ranked"


class FGramVocabulary:
    """Reads f-grams by rank."""

    def __init__(self, folder: Folder, manifest: Manifest) -> None:
        """Made by `open`."""
        self.folder = folder
        self.manifest = manifest
        self.num_fgrams = int(self._statistic("num_fgrams"))
        self.max_fgram_length = int(self._statistic("max_fgram_length"))
        self.token_vocab_size = int(self._statistic("token_vocab_size"))
        self.special_ids = tuple(int(token_id) for token_id in self._statistic("special_ids"))
        self._files = manifest.files_below(f"{RANKED_FOLDER}/")
        self._first_ranks = np.cumsum([0, *(entry.rows for entry in self._files)])
        if self._first_ranks[-1] != self.num_fgrams:
            raise CorruptArtifactError(
                f"the files of {folder} hold {self._first_ranks[-1]:,} f-grams, its manifest says "
                f'{self.num_fgrams:,}; rebuild it with "scone count"'
            )

    @classmethod
    def open(cls, folder: Folder, tokenizer_fingerprint: str | None = None) -> FGramVocabulary:
        """The vocabulary of a finished fgrams artifact.

        Raises:
            MissingArtifactError: Nothing there, or the build never finished.
            IncompatibleArtifactError: Another kind or format, or made with another tokenizer.
            CorruptArtifactError: The manifest is incomplete, or a file has another size than it says.
        """
        return cls(folder, load_manifest(folder, FGRAMS_KIND, FGRAMS_FORMAT, tokenizer_fingerprint))

    def read(self, start: int, stop: int) -> FGrams:
        """The f-grams of ranks [start, stop).

        Raises:
            ValueError: The range is not inside the ranking.
            CorruptArtifactError: A file is missing, truncated or altered.
        """
        if not 0 <= start <= stop <= self.num_fgrams:
            raise ValueError(f"ranks {start:,} to {stop:,} are not inside the {self.num_fgrams:,} f-grams")
        pieces = [FGrams.empty(self.max_fgram_length)]
        for entry, first in zip(self._files, self._first_ranks, strict=False):
            low, high = max(start - int(first), 0), min(stop - int(first), entry.rows)
            if low < high:
                pieces.append(read_fgrams(self.folder, entry, self.max_fgram_length, low, high))
        return FGrams.concatenate(pieces)

    def open_index(self) -> MatchIndex:
        """The match index, mapped read-only (a remote one is copied to the local cache first).

        Raises:
            CorruptArtifactError: The file is missing or damaged, or belongs to another vocabulary.
        """
        from scone.matching import MatchIndex  # readers that never match need no numba

        index = MatchIndex.load(self.folder.local_path(self.manifest.file(MATCH_INDEX_FILE)))
        if (index.num_fgrams, index.token_vocab_size) != (self.num_fgrams, self.token_vocab_size):
            raise CorruptArtifactError(
                f"{self.folder.locate(MATCH_INDEX_FILE)} is of {index.num_fgrams:,} f-grams over "
                f"{index.token_vocab_size:,} tokens, the vocabulary has {self.num_fgrams:,} over "
                f'{self.token_vocab_size:,}; rebuild it with "scone count"'
            )
        return index

    def _statistic(self, name: str) -> Any:
        try:
            return self.manifest.statistics[name]
        except KeyError:
            raise CorruptArtifactError(
                f'the manifest of {self.folder} does not say {name}; rebuild it with "scone count"'
            ) from None
