"""The embedding table F: rows by f-gram id, off the accelerator, as versions of immutable shards.

    FOLDER/versions/00000001.json    what a version holds, created once; the highest number is current
    FOLDER/shards/<xxh3-128>.bin     raw rows of consecutive ranks at a fixed stride, no header
    FOLDER/samples/<xxh3-128>.bin    the exact bytes of some rows of one shard, at the same stride
    FOLDER/index/<xxh3-128>.bin      the match index: f-gram to row id

Nothing here needs torch, except `tensors`.
"""
