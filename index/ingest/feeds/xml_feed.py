"""XML feeds: reads the entries of RSS and Atom as a stream, and refuses what XML can do to its readers.

A document type declaration is refused, so that no entity is defined or loaded. Depth, tags and entries have limits, so
that no feed fills the memory.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from index.errors import LookalikeError
from index.ingest.tables import open_binary, read_error

GOOGLE = "http://base.google.com/ns/1.0"
_PLAIN = frozenset({"", "http://www.w3.org/2005/Atom", "http://purl.org/atom/ns#", "http://purl.org/rss/1.0/"})
_CUSTOM = "http://base.google.com/cns/1.0"
"""Google's namespace for attributes that a shop defines."""
_ROOTS = ("rss", "feed", "RDF")
_ENTRIES = ("item", "entry")
_MAX_ENTRY_DEPTH = 3
_MAX_DEPTH = 32
_MAX_CHARACTERS = 1 << 20
_MAX_FIELDS = 2000
_MAX_TAG_BYTES = 1 << 22
_BLOCK_BYTES = 1 << 16


class Entry(NamedTuple):
    """An entry of a feed: the texts of each of its elements, in their order, or the problem with it."""

    line: int
    values: dict[str, list[str]]
    problem: str = ""


def read_entries(file: Path, title: str) -> Iterator[Entry]:
    """Yields the entries of a feed; raises LookalikeError if it is not well-formed, or declares a document type."""
    reader, done = _Reader(title), 0
    try:
        with open_binary(file) as data:
            while block := data.read(_BLOCK_BYTES):
                reader.parser.Parse(block, False)
                done += len(block)
                if done - reader.parser.CurrentByteIndex > _MAX_TAG_BYTES:
                    raise reader.refuse(f"a tag has more than {_MAX_TAG_BYTES:,} bytes", "Correct the feed.")
                yield from reader.take()
            reader.parser.Parse(b"", True)
            yield from reader.take()
    except expat.ExpatError as error:
        problem = expat.ErrorString(error.code)
        raise reader.refuse(f"not well-formed XML: {problem}", "Write the complete feed again.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise read_error(title, f"after line {reader.parser.CurrentLineNumber}", error) from None


class _Reader:
    """The handlers of a parser, and the entries that they have completed."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._entries: list[Entry] = []
        self._depth = 0
        self._entry_depth = 0
        """Depth of the entry that is being read; 0 outside of one."""
        self.parser = expat.ParserCreate(namespace_separator=" ")
        self.parser.buffer_text = True
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._add_text
        self.parser.StartDoctypeDeclHandler = self._refuse_doctype
        self.parser.EntityDeclHandler = self._refuse_doctype

    def take(self) -> list[Entry]:
        """Returns the entries that are complete, once."""
        entries, self._entries = self._entries, []
        return entries

    def refuse(self, problem: str, remedy: str) -> LookalikeError:
        return LookalikeError(f"{self._title}, line {self.parser.CurrentLineNumber}: {problem}.", remedy)

    def _refuse_doctype(self, *_: object) -> None:
        raise self.refuse("the feed has a document type declaration", "Remove <!DOCTYPE ...>: entities are not read.")

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        namespace, _, local = name.rpartition(" ")
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self.refuse(f"elements are nested deeper than {_MAX_DEPTH}", "Correct the feed.")
        if self._depth == 1 and local not in _ROOTS:
            raise self.refuse(f"the first element is <{local[:60]}>, not <rss> or <feed>", "Give an RSS or Atom feed.")
        if not self._entry_depth:
            if local in _ENTRIES and 1 < self._depth <= _MAX_ENTRY_DEPTH:
                self._begin()
        elif self._depth == self._entry_depth + 1:
            self._field = (namespace, local)
            self._text: list[str] = []
            if local == "link" and attributes.get("rel", "alternate") == "alternate":
                self._text.append(attributes.get("href", ""))
        else:
            self._nested.add(self._field)

    def _begin(self) -> None:
        self._entry_depth, self._line = self._depth, self.parser.CurrentLineNumber
        self._characters = self._fields = 0
        self._google: dict[str, list[str]] = {}
        self._plain: dict[str, list[str]] = {}
        self._nested: set[tuple[str, str]] = set()

    def _add_text(self, text: str) -> None:
        if self._entry_depth and self._depth == self._entry_depth + 1:
            self._characters += len(text)
            if self._characters <= _MAX_CHARACTERS:
                self._text.append(text)

    def _end(self, _: str) -> None:
        if self._entry_depth and self._depth == self._entry_depth + 1:
            self._end_field()
        elif self._depth == self._entry_depth:
            self._entries.append(self._finish())
            self._entry_depth = 0
        self._depth -= 1

    def _end_field(self) -> None:
        namespace, local = self._field
        text = "".join(self._text).strip()
        self._fields += 1
        if not text or self._field in self._nested or self._fields > _MAX_FIELDS:
            return
        if namespace in (GOOGLE, _CUSTOM):
            self._google.setdefault(local, []).append(text)
        elif namespace in _PLAIN:
            self._plain.setdefault(local, []).append(text)

    def _finish(self) -> Entry:
        values = {**self._plain, **self._google}
        if self._characters > _MAX_CHARACTERS:
            return Entry(self._line, _only_id(values), f"more than {_MAX_CHARACTERS:,} characters")
        if self._fields > _MAX_FIELDS:
            return Entry(self._line, _only_id(values), f"more than {_MAX_FIELDS:,} elements")
        return Entry(self._line, values)


def _only_id(values: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: value for name, value in values.items() if name == "id"}
