"""Documents: where they come from, how they are read, which are dropped as duplicates and which are held out."""

from scone.corpus.document import Document, Part, ReadSettings
from scone.corpus.listing import group_parts, list_parts
from scone.corpus.reading import read_part

__all__ = ["Document", "Part", "ReadSettings", "group_parts", "list_parts", "read_part"]
