"""Exact counts of all n-grams of 2 to K tokens in one scan.

coding          how a window of K tokens becomes a slice and a key
windows         one unit of tokens → its distinct windows, sorted
count_object    … in one file, in sections
merging         the windows of many units → together, in bounded memory
survivors       … → the frequent n-grams and the histogram of all counts
ngrams          all of it in memory, without files
kernels         what the loops do
"""

from scone.counting.coding import WindowCoding
from scone.counting.count_object import Codec, CountObject, write_count_object
from scone.counting.merging import WindowMerge
from scone.counting.ngrams import count_ngrams
from scone.counting.survivors import Quota, SurvivorCollector, Survivors
from scone.counting.windows import UnitWindows, Windows

__all__ = [
    "Codec",
    "CountObject",
    "Quota",
    "SurvivorCollector",
    "Survivors",
    "UnitWindows",
    "WindowCoding",
    "WindowMerge",
    "Windows",
    "count_ngrams",
    "write_count_object",
]
