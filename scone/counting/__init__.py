"""Exact counts of all n-grams of 2 to K tokens in one scan.

    coding          how a window of K tokens becomes a slice and a key
    windows         one unit of tokens → its distinct windows, sorted
    count_object    … in one file, in sections
    merging         the windows of many units → together, in bounded memory
    survivors       … → the frequent n-grams and their histogram
    survivor_file   … in one file
"""

from scone.counting.ngrams import count_ngrams

__all__ = ["count_ngrams"]
