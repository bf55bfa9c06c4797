"""XML feeds: entries are read in constant memory, and what an XML file can do to its reader is refused."""

import gzip
import tracemalloc
from pathlib import Path

import pytest

from index.errors import LookalikeError
from index.ingest.feeds.xml_feed import Entry, read_entries

G = 'xmlns:g="http://base.google.com/ns/1.0"'


def rss(*entries: str, before: str = "") -> str:
    return f'<?xml version="1.0"?>{before}<rss version="2.0" {G}>\n<channel>{"".join(entries)}</channel></rss>'


def read(tmp_path: Path, text: str | bytes) -> list[Entry]:
    feed = tmp_path / "feed.xml"
    feed.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_entries(feed, "feed.xml"))


def test_elements_of_google_take_precedence_over_those_of_rss(tmp_path: Path) -> None:
    text = rss(
        "<title>A shop</title>",
        "<item><title>plain</title><link>https://a.example</link><g:title>of Google</g:title>",
        "<g:id>1</g:id><g:size>  M\n </g:size><g:brand/></item>",
    )
    values = {"title": ["of Google"], "link": ["https://a.example"], "id": ["1"], "size": ["M"]}
    assert read(tmp_path, text) == [Entry(2, values)]


def test_atom_gives_the_address_of_its_page_as_an_attribute(tmp_path: Path) -> None:
    text = f"""<feed xmlns="http://www.w3.org/2005/Atom" {G} xmlns:m="http://other.example">
      <title>A shop</title><link href="https://shop.example" rel="self"/>
      <entry><id>1</id><link rel="enclosure" href="https://other.example"/><link href="https://a.example/1"/>
        <m:size>ignored</m:size><g:size><![CDATA[M & L]]></g:size></entry></feed>"""
    assert read(tmp_path, text) == [Entry(3, {"id": ["1"], "link": ["https://a.example/1"], "size": ["M & L"]})]


def test_repeated_elements_are_lists_and_nested_ones_are_left_out(tmp_path: Path) -> None:
    shipping = "<g:shipping><g:country>DE</g:country><g:price>4 EUR</g:price></g:shipping>"
    text = rss(
        f"<item><g:id>1</g:id>{shipping}<g:product_type>a</g:product_type><g:product_type>b</g:product_type></item>"
    )
    assert read(tmp_path, text) == [Entry(2, {"id": ["1"], "product_type": ["a", "b"]})]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1"])
def test_a_feed_is_read_in_the_encoding_that_it_declares(tmp_path: Path, encoding: str) -> None:
    text = f"<?xml version='1.0' encoding='{encoding}'?><rss><channel><item><id>Möbel</id></item></channel></rss>"
    assert read(tmp_path, text.encode(encoding)) == [Entry(1, {"id": ["Möbel"]})]


def test_a_compressed_feed_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, gzip.compress(rss("<item><g:id>1</g:id></item>").encode())) == [Entry(2, {"id": ["1"]})]


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))


@pytest.mark.parametrize(
    "doctype",
    [
        f'<!DOCTYPE rss [<!ENTITY l0 "ha">{LAUGHS}]>',
        '<!DOCTYPE rss [<!ENTITY secret SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE rss SYSTEM "http://127.0.0.1:1/rss.dtd">',
        '<!DOCTYPE rss [<!ENTITY % all SYSTEM "http://127.0.0.1:1/all.dtd"> %all;]>',
        "<!DOCTYPE rss>",
    ],
    ids=["billion laughs", "a file", "a remote DTD", "a parameter entity", "no entity at all"],
)
def test_a_document_type_is_refused(tmp_path: Path, doctype: str) -> None:
    with pytest.raises(LookalikeError, match=r"line 1: the feed has a document type declaration.*Remove <!DOCTYPE"):
        read(tmp_path, rss("<item><g:id>&l9;&secret;</g:id></item>", before=doctype))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (rss("<item><g:id>1</g:id>"), "line 2: not well-formed XML: mismatched tag"),
        (rss("<item><g:id>1</g:id></item>")[:-12], "line 2: not well-formed XML: "),
        (rss("<item><g:id>&nbsp;</g:id></item>"), "line 2: not well-formed XML: undefined entity"),
        ("<rss><channel><item><g:id>1</g:id></item></channel></rss>", "not well-formed XML: unbound prefix"),
        ("<html><body/></html>", "the first element is <html>, not <rss> or <feed>"),
        ("<rss>" + "<a>" * 100_000, "elements are nested deeper than 32"),
        (f"<rss><a b='{'x' * (5 << 20)}", "a tag has more than 4,194,304 bytes"),
        (b"\xff\xfe\x00", "not well-formed XML"),
    ],
    ids=["not closed", "cut off", "entity", "namespace", "a page", "depth", "a long tag", "bytes"],
)
def test_what_is_not_a_feed_is_an_error_with_its_line(tmp_path: Path, text: str | bytes, problem: str) -> None:
    with pytest.raises(LookalikeError, match=problem):
        read(tmp_path, text)


def test_a_cut_compressed_feed_is_an_error(tmp_path: Path) -> None:
    entries = [f"<item><g:id>{number}</g:id></item>" for number in range(50_000)]
    with pytest.raises(LookalikeError, match=r"feed.xml, after line 2: .*Write the complete table again"):
        read(tmp_path, gzip.compress(rss(*entries).encode())[:-2000])


def test_an_entry_that_is_too_large_is_a_bad_entry_only(tmp_path: Path) -> None:
    long = f"<item><g:id>1</g:id><g:description>{'x' * (3 << 20)}</g:description></item>"
    many = f"<item><g:id>2</g:id>{'<g:size>M</g:size>' * 3000}</item>"
    good = "<item><g:id>3</g:id></item>"
    assert read(tmp_path, rss(long, many, good)) == [
        Entry(2, {"id": ["1"]}, "more than 1,048,576 characters"),
        Entry(2, {"id": ["2"]}, "more than 2,000 elements"),
        Entry(2, {"id": ["3"]}),
    ]


def test_a_long_feed_is_read_in_constant_memory(tmp_path: Path) -> None:
    def peak(entries: int) -> int:
        text = "<g:description>A chair of oak.</g:description>" * 5
        feed = tmp_path / "feed.xml"
        feed.write_text(rss(*(f"<item><g:id>{number}</g:id>{text}</item>" for number in range(entries))))
        tracemalloc.start()
        assert sum(1 for _ in read_entries(feed, "feed.xml")) == entries
        _, used = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return used

    peak(10)  # what is allocated once
    assert peak(20_000) < 2 * peak(1000)
