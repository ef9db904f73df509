"""Python source for training: the standard library and installed packages under permissive licences.

Files are dropped, each for one named reason, if they are tests, generated, minified, tables of data, too large or too
small, not UTF-8, not Python 3, or under another licence than their package. The split is by the hash of the content.
"""

import ast
import hashlib
import re
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import distributions
from multiprocessing import Pool
from pathlib import Path

from models.licences import permissive_licence

STANDARD_LIBRARY = "python"
# Whole packages kept out of training, to see the loss on code of unknown authors.
UNSEEN_PACKAGES = frozenset({"click", "humanize", "imageio", "werkzeug"})
HELDOUT_PER_MILLE = 20

_MAX_FILE_BYTES = 200_000
_MIN_FILE_BYTES = 200
_TEST_FOLDERS = frozenset({"test", "tests", "_test", "_tests", "testing", "testdata", "idle_test", "idlelib"})
_VENDORED_FOLDERS = frozenset({"_vendor", "_vendored", "vendored", "vendor", "third_party", "extern", "externals"})
_GENERATED_FOLDERS = frozenset({"_generated", "generated", "pydoc_data"})
_TEST_NAME = re.compile(r"^(test_.*|.*_test|.*_tests|tests?|conftest)\.py$")
_GENERATED = re.compile(
    r"(automatically|auto)[- ]?generated|generated (by|protocol)|do not (edit|modify)|gencodec",
    re.IGNORECASE,
)
_OTHER_LICENCE = re.compile(
    r"general public licen[cs]e|\b[al]?gpl|mozilla public|proprietary|creativecommons|creative commons", re.IGNORECASE
)
_COMMON_LINE_LENGTH = 20
_MAX_COMMON_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Package:
    """Where one package's files are; `files` pairs a path relative to the package's root with the file on disk."""

    name: str
    version: str
    licence: str
    files: tuple[tuple[str, Path], ...]
    licence_files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class SourceFile:
    package: str
    path: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True, slots=True)
class Corpus:
    """The split. `unseen` holds files of UNSEEN_PACKAGES; `dropped` counts the files left out by reason."""

    train: list[SourceFile]
    heldout: list[SourceFile]
    unseen: list[SourceFile]
    packages: list[Package]
    refused_packages: list[str]
    dropped: Counter[str]


def collect_corpus(max_files: int | None, num_processes: int) -> Corpus:
    """Read, filter and split every source file of this Python installation; `max_files` makes trials quick."""
    packages, refused = _list_packages()
    tasks = [(package.name, path, file) for package in packages for path, file in package.files]
    if max_files is not None:
        tasks = tasks[:: max(1, len(tasks) // max_files)]
    dropped: Counter[str] = Counter()
    seen: set[str] = set()
    files: list[SourceFile] = []
    with Pool(num_processes) as pool:
        for result in pool.imap(_read_file, tasks, chunksize=64):
            if isinstance(result, str):
                dropped[result] += 1
            elif result.digest in seen:
                dropped["identical to another"] += 1
            else:
                seen.add(result.digest)
                files.append(result)
    files.sort(key=lambda file: file.digest)
    unseen = [file for file in files if file.package in UNSEEN_PACKAGES]
    rest = [file for file in files if file.package not in UNSEEN_PACKAGES]
    candidates = [file for file in rest if int(file.digest[:8], 16) % 1000 < HELDOUT_PER_MILLE]
    train = [file for file in rest if int(file.digest[:8], 16) % 1000 >= HELDOUT_PER_MILLE]
    common = set(_long_line_hashes(train))
    heldout: list[SourceFile] = []
    for file in candidates:
        lines = list(_long_line_hashes([file]))
        if lines and sum(line in common for line in lines) <= _MAX_COMMON_SHARE * len(lines):
            heldout.append(file)
        else:
            # A near copy of training files says nothing about held-out loss. It is not trained on either.
            dropped["held-out candidate, over half of its lines in training files"] += 1
    return Corpus(train, heldout, unseen, packages, refused, dropped)


def _list_packages() -> tuple[list[Package], list[str]]:
    library = Path(sysconfig.get_paths()["stdlib"])
    located = [(path.relative_to(library).as_posix(), path) for path in sorted(library.rglob("*.py"))]
    files = tuple(item for item in located if not item[0].startswith(("site-packages/", "dist-packages/")))
    version = ".".join(str(part) for part in sys.version_info[:3])
    packages = {STANDARD_LIBRARY: Package(STANDARD_LIBRARY, version, "PSF-2.0", files, ())}
    refused: set[str] = set()
    for distribution in distributions():
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        records = distribution.files or []
        sources = [record for record in records if record.suffix == ".py" and ".." not in record.parts]
        if name in packages or name == "outrider" or not sources:
            continue
        licence = permissive_licence(distribution)
        if licence is None:
            refused.add(name)
            continue
        texts = [
            Path(str(distribution.locate_file(record)))
            for record in records
            if ".dist-info" in record.parts[0] and re.match(r"(LICEN[CS]E|COPYING|NOTICE)", record.name, re.IGNORECASE)
        ]
        located = tuple((record.as_posix(), Path(str(distribution.locate_file(record)))) for record in sources)
        packages[name] = Package(name, distribution.version, licence, located, tuple(texts))
    return sorted(packages.values(), key=lambda package: package.name), sorted(refused)


def _read_file(task: tuple[str, str, Path]) -> SourceFile | str:
    """The file, or the reason why it is left out."""
    package, relative, path = task
    folders = set(relative.lower().split("/")[:-1])
    if folders & _VENDORED_FOLDERS:
        return "vendored"
    if folders & _GENERATED_FOLDERS:
        return "generated"
    if folders & _TEST_FOLDERS or _TEST_NAME.match(path.name.lower()):
        return "test"
    try:
        content = path.read_bytes()
    except OSError:
        return "unreadable"
    if not _MIN_FILE_BYTES <= len(content) <= _MAX_FILE_BYTES:
        return "too large or too small"
    try:
        text = content.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return "not UTF-8"
    return _reason_to_drop(text) or SourceFile(package, relative, text)


def _reason_to_drop(text: str) -> str | None:
    lines = text.splitlines()
    head = text[:1500]
    if _GENERATED.search(head):
        return "generated"
    if _OTHER_LICENCE.search(head):
        return "names another licence"
    if max(map(len, lines)) > 500 or len(text) / len(lines) > 100:
        return "minified or long lines"
    if sum(map(str.isdigit, text)) > 0.15 * len(text) or "\r" in text or "\0" in text:
        return "table of data"
    if "<|endoftext|>" in text:
        return "contains the end-of-text marker"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "not Python 3"
    return None


def _long_line_hashes(files: Iterable[SourceFile]) -> Iterator[int]:
    for file in files:
        for line in file.text.splitlines():
            stripped = line.strip()
            if len(stripped) >= _COMMON_LINE_LENGTH:
                yield hash(stripped)
