"""How a window of K tokens becomes a slice number and a key: exact, without hashing.

The slice tells the leading bits of a window's first two tokens, mixed invertibly; the key holds their other bits
and the further tokens, in one 64-bit word or two. A token id that no window can hold stands for positions past
the end of a window. A slice is small enough to be sorted in the cache; a *section* is a range of slices, the
smallest piece that a merge reads.

Some bigrams are so frequent that their slice would be the work of many. A prefix with more than its share of the
windows is *heavy*: its windows go to slices by their shortest prefix that is not, the last two tokens of which
take the place of the first two. Slices are therefore numbered by section, length of that prefix, and mixed bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

MAX_FGRAM_LENGTH = 8
MAX_TOKEN_VOCAB_SIZE = 1 << 18

_WORD_BITS = 64
_MAX_WORDS = 2
# One word instead of two halves the bytes, which pays for up to this many slices; more slices only if they must be.
_PREFERRED_SLICE_BITS = 13
_MAX_SLICE_BITS = 20
_FILTER_BITS = 16
_PARENT_BITS = 18  # of a heavy prefix's table key, which holds a parent and a token

Prefix = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WindowCoding:
    """The slices and keys of one count; everything that must agree among units that are merged."""

    max_fgram_length: int
    token_bits: int
    sentinel: int
    """Stands for a position past the end of a window."""
    slice_bits: int
    section_bits: int = 0
    heavy: tuple[Prefix, ...] = ()
    """Heavy prefixes of 2 to K - 1 tokens; one that is longer than 2 follows the one it extends."""

    @classmethod
    def choose(
        cls,
        max_fgram_length: int,
        token_vocab_size: int,
        special_ids: Sequence[int],
        slice_bits: int,
        section_bits: int = 0,
    ) -> WindowCoding:
        """The coding with at least 2^`slice_bits` slices, and more of them where that saves or allows the key.

        Raises:
            ValueError: K is not 2 to 8, or the vocabulary is too large for exact keys.
        """
        if not 2 <= max_fgram_length <= MAX_FGRAM_LENGTH:
            raise ValueError(f"max_fgram_length must be 2 to {MAX_FGRAM_LENGTH}, got {max_fgram_length}")
        if not 1 <= token_vocab_size <= MAX_TOKEN_VOCAB_SIZE:
            raise ValueError(
                f"counting takes up to {MAX_TOKEN_VOCAB_SIZE:,} token ids, the tokenizer has {token_vocab_size:,}"
            )
        token_bits = max(1, (token_vocab_size - 1).bit_length())
        sentinel = token_vocab_size
        if token_vocab_size == 1 << token_bits:
            # No spare id in these bits: special ids stand in no window, so one of them can serve.
            sentinel = special_ids[0] if special_ids else sentinel
            token_bits += 0 if special_ids else 1
        window_bits = max_fgram_length * token_bits
        slice_bits = max(slice_bits, section_bits)
        for num_words, most in ((1, _PREFERRED_SLICE_BITS), (_MAX_WORDS, _MAX_SLICE_BITS)):
            needed = max(slice_bits, window_bits - num_words * _WORD_BITS)
            if needed <= max(slice_bits, most):
                chosen = min(needed, 2 * token_bits)
                return cls(max_fgram_length, token_bits, sentinel, chosen, min(section_bits, chosen))
        raise ValueError(
            f"windows of {max_fgram_length} tokens out of {token_vocab_size:,} without a special id do not fit "
            "exact keys; name a special id or lower max_fgram_length"
        )

    def with_heavy(self, prefixes: Sequence[Prefix]) -> WindowCoding:
        """The same coding with these heavy prefixes.

        Raises:
            ValueError: A prefix has not 2 to K - 1 tokens, or extends one that is not heavy.
        """
        ordered = sorted({tuple(prefix) for prefix in prefixes}, key=lambda prefix: (len(prefix), prefix))
        for prefix in ordered:
            if not 2 <= len(prefix) < self.max_fgram_length:
                raise ValueError(f"a heavy prefix has 2 to {self.max_fgram_length - 1} tokens, got {list(prefix)}")
            if len(prefix) > 2 and prefix[:-1] not in ordered:
                raise ValueError(f"{list(prefix)} cannot be heavy where {list(prefix[:-1])} is not")
        return replace(self, heavy=tuple(ordered))

    @property
    def num_classes(self) -> int:
        """Lengths that a window's shortest prefix that is not heavy may have: 2 and on."""
        return max((len(prefix) for prefix in self.heavy), default=1)

    @property
    def num_sections(self) -> int:
        return 1 << self.section_bits

    @property
    def slices_per_section(self) -> int:
        return self.num_classes << (self.slice_bits - self.section_bits)

    @property
    def num_slices(self) -> int:
        return self.num_sections * self.slices_per_section

    @property
    def key_bits(self) -> int:
        return max(1, self.max_fgram_length * self.token_bits - self.slice_bits)

    @property
    def num_words(self) -> int:
        return -(-self.key_bits // _WORD_BITS)

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """What the kernels take."""
        bits = (self.token_bits, self.slice_bits, self.section_bits)
        return (*bits, self.max_fgram_length, self.sentinel, self.num_classes)

    def heavy_tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Heavy prefixes for the kernels: an open-addressed table from (parent, token) to the prefix's number, and a
        filter of bigrams. A parent is a token id, or 2^18 + the number of a heavy prefix."""
        from scone.counting import kernels

        size = 1 << max(4, (4 * len(self.heavy)).bit_length())
        keys, numbers = np.zeros(size, np.uint64), np.zeros(size, np.int64)
        filter_words = np.zeros((1 << _FILTER_BITS) // 64, np.uint64)
        number_of = {prefix: number for number, prefix in enumerate(self.heavy)}
        for prefix, number in number_of.items():
            parent = prefix[0] if len(prefix) == 2 else (1 << _PARENT_BITS) + number_of[prefix[:-1]]
            kernels.add_heavy(keys, numbers, parent, prefix[-1], number)
            if len(prefix) == 2:
                kernels.add_to_filter(filter_words, prefix[0], prefix[1], self.token_bits)
        return keys, numbers, filter_words

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "max_fgram_length": self.max_fgram_length,
            "token_bits": self.token_bits,
            "sentinel": self.sentinel,
            "slice_bits": self.slice_bits,
            "section_bits": self.section_bits,
            "heavy": [list(prefix) for prefix in self.heavy],
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> WindowCoding:
        return cls(**{**value, "heavy": tuple(tuple(prefix) for prefix in value["heavy"])})
