"""The demo model's text: four public-domain works as Debian packages install them.

    bible-kjv-text   /usr/lib/bible.data                       LZW stream, one verse a line
    sword-text-web   /usr/share/sword/modules/texts/ztext/…    SWORD zText module, OSIS mark-up
    jargon-text      /usr/share/doc/jargon-text/jargon.txt.gz  formatted text
    dict-devil       /usr/share/dictd/devil.dict.dz            formatted text

In: the root of a file system with the packages.  Out: documents of clean text, split into training text
and the held-out books, which are the same ones in both translations, so that neither gives the other
away.  Verse numbers, notes and mark-up are gone; quotation marks are ASCII.  This file refuses to know
tokens and models.  Standard library only.
"""

from __future__ import annotations

import gzip
import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("bible-kjv-text", "sword-text-web", "jargon-text", "dict-devil")
KJV_PATH = "usr/lib/bible.data"
WEB_PATH = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
JARGON_PATH = "usr/share/doc/jargon-text/jargon.txt.gz"
DEVIL_PATH = "usr/share/dictd/devil.dict.dz"

# The canonical order, which is the KJV file's order, by OSIS id.
BOOKS = dict(
    pair.split(":")
    for pair in """Gen:Genesis|Exod:Exodus|Lev:Leviticus|Num:Numbers|Deut:Deuteronomy|Josh:Joshua|Judg:Judges|Ruth:Ruth|
1Sam:1 Samuel|2Sam:2 Samuel|1Kgs:1 Kings|2Kgs:2 Kings|1Chr:1 Chronicles|2Chr:2 Chronicles|Ezra:Ezra|Neh:Nehemiah|
Esth:Esther|Job:Job|Ps:Psalms|Prov:Proverbs|Eccl:Ecclesiastes|Song:Song of Solomon|Isa:Isaiah|Jer:Jeremiah|
Lam:Lamentations|Ezek:Ezekiel|Dan:Daniel|Hos:Hosea|Joel:Joel|Amos:Amos|Obad:Obadiah|Jonah:Jonah|Mic:Micah|Nah:Nahum|
Hab:Habakkuk|Zeph:Zephaniah|Hag:Haggai|Zech:Zechariah|Mal:Malachi|Matt:Matthew|Mark:Mark|Luke:Luke|John:John|Acts:Acts|
Rom:Romans|1Cor:1 Corinthians|2Cor:2 Corinthians|Gal:Galatians|Eph:Ephesians|Phil:Philippians|Col:Colossians|
1Thess:1 Thessalonians|2Thess:2 Thessalonians|1Tim:1 Timothy|2Tim:2 Timothy|Titus:Titus|Phlm:Philemon|Heb:Hebrews|
Jas:James|1Pet:1 Peter|2Pet:2 Peter|1John:1 John|2John:2 John|3John:3 John|Jude:Jude|Rev:Revelation""".replace(
        "\n", ""
    ).split("|")
)
# Only in the WEB module.
DEUTEROCANON = {
    "PrMan": "Prayer of Manasses",
    "Tob": "Tobit",
    "Jdt": "Judith",
    "EsthGr": "Esther from the Greek",
    "AddPs": "Psalm 151",
    "Wis": "Wisdom of Solomon",
    "Sir": "Sirach",
    "Bar": "Baruch",
    "DanGr": "Daniel from the Greek",
    "1Esd": "1 Esdras",
    "2Esd": "2 Esdras",
    "1Macc": "1 Maccabees",
    "2Macc": "2 Maccabees",
    "3Macc": "3 Maccabees",
    "4Macc": "4 Maccabees",
}
HELD_OUT_BOOKS = (
    "Ruth",
    "Ecclesiastes",
    "Lamentations",
    "Jonah",
    "Habakkuk",
    "Malachi",
    "Mark",
    "Galatians",
    "James",
    "1 John",
)

_ASCII = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "\u00a0": " ", "\u2009": " ", "–": "-", "…": "..."})


@dataclass(frozen=True, slots=True)
class Document:
    """One piece of text the model sees from its first character to its end."""

    source: str  # kjv, web, jargon, devil
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def build_corpus(root: Path = Path("/")) -> Corpus:
    """Read all four works below `root`.  Raises FileNotFoundError naming the packages if one is missing."""
    missing = [p for p in (KJV_PATH, f"{WEB_PATH}/ot.bzz", JARGON_PATH, DEVIL_PATH) if not (root / p).exists()]
    if missing:
        raise FileNotFoundError(f"{missing} not found under {root}: apt install {' '.join(PACKAGES)}")
    documents = [
        *kjv_documents((root / KJV_PATH).read_bytes()),
        *web_documents(root / WEB_PATH),
        *jargon_documents(gzip.decompress((root / JARGON_PATH).read_bytes()).decode()),
        *devil_documents(gzip.decompress((root / DEVIL_PATH).read_bytes()).decode()),
    ]
    held_out = [d for d in documents if d.source in ("kjv", "web") and d.title in HELD_OUT_BOOKS]
    return Corpus(tuple(d for d in documents if d not in held_out), tuple(held_out))


def tidy(text: str) -> str:
    """ASCII quotation marks, single spaces, at most one empty line, nothing at the ends of lines."""
    text = text.translate(_ASCII).replace(" -- ", "—").replace("\t", " ")
    text = re.sub(r" +", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


# --- King James Version: 88 bytes of header, number and offsets of windows, then one `compress` stream ---


def kjv_documents(data: bytes) -> Iterator[Document]:
    """Books from the bytes of bible.data.  A line reads `Ge1:1 In the beginning…`."""
    if data[:4] != b"EC02":
        raise ValueError("bible.data: expected the magic EC02 of the Bible Retrieval System")
    (num_windows,) = struct.unpack_from(">I", data, 88)
    lines = unpack_lzw(data[92 + 4 * (num_windows + 1) :]).decode("latin-1").splitlines()
    books: dict[str, dict[int, list[str]]] = {}
    for line in lines:
        if match := re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line):
            books.setdefault(match[1], {}).setdefault(int(match[2]), []).append(match[3])
    for name, chapters in zip(BOOKS.values(), books.values(), strict=True):
        yield _book("kjv", name, name.upper(), {n: "\n".join(verses) for n, verses in chapters.items()})


def unpack_lzw(data: bytes) -> bytes:
    """Undo Unix `compress` (magic 1f 9d, block mode): codes of 9…16 bits, least significant bit first.

    Codes come in groups of eight; a change of width and the clear code 256 skip the rest of a group.
    """
    if data[:2] != b"\x1f\x9d" or not data[2] & 0x80:
        raise ValueError("expected a compress stream in block mode")
    max_bits, clear = data[2] & 0x1F, 256
    table = [bytes([i]) for i in range(256)] + [b""]
    out: list[bytes] = []
    previous = b""
    bits, start, group = 9, 3, 0  # the group of codes begins at byte `start`; `group` codes of it are read
    while True:
        position = start * 8 + group * bits
        if position + bits > len(data) * 8:
            return b"".join(out)
        window = int.from_bytes(data[position // 8 : position // 8 + 4], "little")
        code = window >> position % 8 & (1 << bits) - 1
        group += 1
        if group == 8:
            start, group = start + bits, 0
        if code == clear:
            start, group, bits, previous = start + bits * (group > 0), 0, 9, b""
            del table[257:]
            continue
        entry = table[code] if code < len(table) else previous + previous[:1]
        out.append(entry)
        if previous and len(table) < 1 << max_bits:
            table.append(previous + entry[:1])
            if len(table) == 1 << bits and bits < max_bits:
                start, group, bits = start + bits * (group > 0), 0, bits + 1
        previous = entry


# --- World English Bible: per testament .bzs (offset, size, unpacked size) and .bzz (zlib blocks, in order) ---


def web_documents(module: Path) -> Iterator[Document]:
    """Books from a zText module whose blocks, put together, are one OSIS text."""
    osis = "".join(_sword_blocks(module / "ot")) + "".join(_sword_blocks(module / "nt"))
    for match in re.finditer(r'<div [^>]*osisID="(\w+)" sID="(\w+)" type="book"/>', osis):
        end = osis.index(f'eID="{match[2]}"', match.end())
        name = BOOKS.get(match[1]) or DEUTEROCANON[match[1]]
        pieces = re.split(r'<chapter n="(\d+)" osisID="[^"]*" sID="[^"]*"/>', osis[match.end() : end])
        chapters = {int(n): osis_to_text(body) for n, body in zip(pieces[1::2], pieces[2::2], strict=True)}
        yield _book("web", name, name, chapters)


def _sword_blocks(stem: Path) -> Iterator[str]:
    index, packed = stem.with_suffix(".bzs").read_bytes(), stem.with_suffix(".bzz").read_bytes()
    for offset, size, _unpacked in struct.iter_unpack("<III", index):
        if size:
            yield zlib.decompress(packed[offset : offset + size]).decode()


def osis_to_text(osis: str) -> str:
    """Paragraphs and lines of poetry as lines; notes and headings that are not the text's own dropped."""
    osis = re.sub(r"\n", " ", osis)
    osis = re.sub(r"<note\b.*?</note>", " ", osis)
    osis = re.sub(r'<title (?![^>]*canonical="true")[^>]*>.*?</title>|<title>.*?</title>', " ", osis)
    osis = re.sub(r'<(?:l|lb|lg|item)\b[^>]*>|</?(?:title|speaker)\b[^>]*>|<div [^>]*type="x-p"/>', "\n", osis)
    text = re.sub(r"<[^>]*(?:>|$)", "", osis).replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    text = re.sub(r" +([,.;:?!])", r"\1", text)
    return re.sub(r"\n\s*", "\n", tidy(text))


def _book(source: str, name: str, heading: str, chapters: dict[int, str]) -> Document:
    word = "Psalm" if name == "Psalms" else "Chapter"
    parts = [f"{word} {number}\n{tidy(text)}" for number, text in chapters.items() if text.strip()]
    return Document(source, name, "\n\n".join([heading, *parts]))


# --- The two dictionaries ---


def jargon_documents(text: str) -> Iterator[Document]:
    """Entries `head, n.` with their paragraphs, then the essays of the introduction and the appendices."""
    text = text.replace("\u00a0", " ")
    lexicon = text.index("Part II. The Jargon Lexicon")
    appendices = text.index("Part III. Appendices", lexicon)
    entry: list[str] | None = None  # None between a letter's table of contents and its first entry
    for paragraph in text[lexicon:appendices].split("\n\n"):
        head = re.match(r" {3}:(.+?):(?: |$)(.*)", paragraph, re.DOTALL)
        letter = re.fullmatch(r"\s*(?:[A-Z]|Glossary)\s*", paragraph)
        if (head or letter) and entry:
            yield Document("jargon", entry[0].split(",")[0], "\n".join(entry))
        if head:
            kind = re.sub(r"(?:,? ?/[^/]*/)+,?", "", " ".join(head[2].split())).strip()
            entry = [f"{head[1]}, {kind}" if kind else f"{head[1]}:"]
        elif letter:
            entry = None
        elif entry is not None and (clean := _jargon_paragraph(paragraph)):
            entry.append(clean)
    for part in (text[text.index("Chapter 1. Hacker Slang and") : lexicon], text[appendices:]):
        for essay in re.split(r"\n(?=(?:Chapter|Appendix) \w+\. )", part):
            clean = "\n".join(filter(None, map(_jargon_paragraph, essay.split("\n\n"))))
            yield Document("jargon", clean.split("\n")[0], re.sub(r"^(Chapter|Appendix) \w+\. ", "", clean))


def _jargon_paragraph(paragraph: str) -> str:
    """One line of prose; lines that are set in further stay lines; tables and contents are dropped."""
    lines = [line[3:] if line.startswith("   ") else line for line in paragraph.strip("\n").splitlines()]
    if any(re.search(r"[\u2500-\u257f]|\S {4,}\S", line) for line in lines) or "Table of Contents" in paragraph:
        return ""
    joined = ("\n" if any(line.startswith("  ") for line in lines) else " ").join(lines)
    return tidy(re.sub(r"\{([^{}]*)\}", r"\1", joined))


def devil_documents(text: str) -> Iterator[Document]:
    """Entries `WORD, n.  definition`, with their verses kept as lines."""
    body = text[text.index("ABASEMENT, n.") :]
    starts = [m.start() for m in re.finditer(r"(?m)^[A-Z][A-Z' -]+(?:, [a-z.]+|\.) ", body)]
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        clean = _unwrap_verse(body[start:end].splitlines())
        yield Document("devil", re.split(r"[,.]", clean)[0], clean)


def _unwrap_verse(lines: list[str]) -> str:
    """Join wrapped prose; a line set in by four is verse, unless prose follows it: then a paragraph begins."""
    out = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        indent = len(line) - len(line.lstrip())
        begins = indent == 4 and following[:1] not in ("", " ")
        if not line.strip():
            out += "\n"
        elif indent and not begins:
            out += "\n" + ("—" if indent > 30 else "") + line.strip()
        else:
            out += ("\n" if begins or out.endswith("\n") else " ") + line.strip()
    return re.sub(r"\n{2,}", "\n", tidy(out))
