"""Which documents are kept, and on which side of the split: decided from hashes alone.

Held out are whole groups: packages or files chosen by the hash of their name, or, where every document is its
own group, documents by the hash of their text. A text that stands on both sides stays in training and leaves
the held-out side: what is shared between groups (licences, boilerplate) would not be unseen text.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from scone.errors import CorpusError

DROPPED, TRAIN, HELDOUT = 0, 1, 2

_OVERSHOOT = 1.25  # a group that would take the held-out side beyond this much of its share is passed over

Uint64Array = npt.NDArray[np.uint64]


def hash_text(text: str) -> tuple[int, int]:
    """Low and high 64 bits of the xxh3-128 of a text's UTF-8."""
    digest = xxhash.xxh3_128_intdigest(text.encode())
    return digest & (2**64 - 1), digest >> 64


def hash_group(name: str) -> int:
    """64 bits that decide on which side a group of this name stands."""
    return int(xxhash.xxh3_64_intdigest(name.encode()))


def is_heldout_by_hash(group_hash: int, fraction: float) -> bool:
    """Whether a group of documents is held out, where there are too many groups to weigh them."""
    return group_hash < int(fraction * 2**64)


def choose_heldout_groups(bytes_by_group: Mapping[str, int], fraction: float) -> frozenset[str]:
    """Groups in the order of their hashes until `fraction` of the bytes is held out, large ones passed over.

    At least one group is held out and at least one is not, if there are two with text.
    """
    ranked = sorted((hash_group(name), name) for name, size in bytes_by_group.items() if size)
    if len(ranked) < 2:
        return frozenset()
    wanted = fraction * sum(bytes_by_group.values())
    chosen: set[str] = set()
    size = 0
    for _, name in ranked:
        if size < wanted and size + bytes_by_group[name] <= _OVERSHOOT * wanted:
            chosen.add(name)
            size += bytes_by_group[name]
    if not chosen:
        chosen.add(min((bytes_by_group[name], name) for _, name in ranked)[1])
    return frozenset(chosen)


def match_patterns(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """Names that match one of the patterns (`*`, `?`).

    Raises:
        CorpusError: A pattern matches no name.
    """
    known = list(names)
    chosen: set[str] = set()
    for pattern in patterns:
        found = fnmatch.filter(known, pattern)
        if not found:
            nearest = difflib.get_close_matches(pattern, known, n=1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known[:20])}"
            raise CorpusError(f"tokenize.heldout_groups: {pattern!r} is no source of the corpus; {hint}")
        chosen.update(found)
    return frozenset(chosen)


def decide(low: Uint64Array, high: Uint64Array, is_heldout: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """DROPPED, TRAIN or HELDOUT for each document, given in corpus order by the halves of its hash [D] each.

    Of equal texts, the first of the training side is kept, else the first of the held-out side.
    """
    order = np.lexsort((np.arange(len(low)), is_heldout, low, high))
    is_first = np.ones(len(low), dtype=bool)
    is_first[1:] = (low[order][1:] != low[order][:-1]) | (high[order][1:] != high[order][:-1])
    decisions = np.full(len(low), DROPPED, dtype=np.uint8)
    kept = order[is_first]
    decisions[kept] = np.where(is_heldout[kept], HELDOUT, TRAIN)
    return decisions
