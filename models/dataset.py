"""The data stage: corpus, tokenizer and token streams on disk, DATA.md, and the committed held-out sample."""

import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from models.corpus import HELDOUT_PER_MILLE, STANDARD_LIBRARY, UNSEEN_PACKAGES, Corpus, SourceFile, collect_corpus
from models.tokenizer import pack_files, save_tokenizer, train_tokenizer

_SAMPLE_FILES = 32
_SAMPLE_BYTES = 185_000
_SAMPLE_FILE_BYTES = (1_200, 7_000)
_SAMPLE_FILES_PER_PACKAGE = 3
_SAMPLE_MIN_FUNCTIONS = 3
# Redistributed files carry their package's licence; packages with very long ones (many bundled works) are passed over.
_MAX_LICENCE_BYTES = 13_000


def prepare_data(work: Path, out: Path, max_files: int | None, num_processes: int) -> None:
    """Write streams and held-out files under `work`, and the tokenizer, DATA.md and heldout/ under `out`."""
    start = time.monotonic()
    corpus = collect_corpus(max_files, num_processes)
    _say(start, f"{len(corpus.train)} training files, {len(corpus.heldout)} held-out, {len(corpus.unseen)} unseen")
    tokenizer = train_tokenizer(corpus.train)
    _say(start, f"tokenizer trained, {tokenizer.get_vocab_size()} tokens")
    work.mkdir(parents=True, exist_ok=True)
    num_tokens: dict[str, int] = {}
    for split, files in _splits(corpus):
        stream = pack_files(tokenizer, files)
        np.save(work / f"{split}.npy", stream)
        num_tokens[split] = len(stream)
        _say(start, f"{split}: {len(stream):,} tokens of {sum(file.num_bytes for file in files):,} bytes")
    for split, files in _splits(corpus)[1:]:
        write_files(work / f"{split}.jsonl", files)
    for name in ("demo-target", "demo-draft"):
        save_tokenizer(tokenizer, out / name)
    sample = _write_sample(corpus, out / "heldout")
    (out / "DATA.md").write_text(_describe(corpus, num_tokens, sample))
    _say(start, f"{len(sample)} files in the held-out sample; data stage done")


def write_files(path: Path, files: Iterable[SourceFile]) -> None:
    lines = (json.dumps({"package": f.package, "path": f.path, "text": f.text}) for f in files)
    path.write_text("\n".join(lines) + "\n")


def read_files(path: Path) -> list[SourceFile]:
    """Held-out files from what write_files wrote, or from a folder <package>/<name>.py.txt."""
    if path.is_dir():
        return [
            SourceFile(file.parent.name, file.name.removesuffix(".txt"), file.read_text(encoding="utf-8"))
            for file in sorted(path.glob("*/*.py.txt"))
        ]
    return [SourceFile(**json.loads(line)) for line in path.read_text().splitlines()]


def _splits(corpus: Corpus) -> list[tuple[str, list[SourceFile]]]:
    return [("train", corpus.train), ("heldout", corpus.heldout), ("unseen", corpus.unseen)]


def _write_sample(corpus: Corpus, folder: Path) -> list[SourceFile]:
    """Copy a few small held-out files of packages whose licence text is at hand, with that text."""
    licences = {
        package.name: "\n".join(
            path.read_text(encoding="utf-8", errors="replace") for path in package.licence_files if path.is_file()
        )
        for package in corpus.packages
    }
    for old in (*folder.glob("*/*.txt"), *folder.glob("*.txt")):
        old.unlink()
    chosen: list[SourceFile] = []
    per_package: Counter[str] = Counter()
    room = _SAMPLE_BYTES
    low, high = _SAMPLE_FILE_BYTES
    # Files are in the order of their hashes, which is as good as a random one.
    for file in (*corpus.heldout, *corpus.unseen):
        licence = licences[file.package]
        cost = file.num_bytes + (0 if per_package[file.package] else len(licence.encode()))
        fits = low <= file.num_bytes <= high and cost <= room and 0 < len(licence) <= _MAX_LICENCE_BYTES
        fits = fits and file.text.count("def ") >= _SAMPLE_MIN_FUNCTIONS
        if not fits or per_package[file.package] == _SAMPLE_FILES_PER_PACKAGE or len(chosen) == _SAMPLE_FILES:
            continue
        chosen.append(file)
        per_package[file.package] += 1
        room -= cost
        target = folder / file.package / (file.path.replace("/", ".") + ".txt")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.text, encoding="utf-8")
        (target.parent / "LICENCE.txt").write_text(licence, encoding="utf-8")
    return sorted(chosen, key=lambda file: (file.package, file.path))


def _describe(corpus: Corpus, num_tokens: dict[str, int], sample: list[SourceFile]) -> str:
    """The text of DATA.md."""
    by_name = {package.name: package for package in corpus.packages}
    rows: list[str] = []
    for package in corpus.packages:
        in_train = [file for file in corpus.train if file.package == package.name]
        others = [file for file in (*corpus.heldout, *corpus.unseen) if file.package == package.name]
        if in_train or others:
            size = sum(file.num_bytes for file in (*in_train, *others))
            name = "standard library" if package.name == STANDARD_LIBRARY else package.name
            rows.append(
                f"| {name} | {package.version} | {package.licence} | {len(in_train)} | {len(others)} | {size:,} |"
            )
    split_rows = [
        f"| {split} | {len(files):,} | {sum(file.num_bytes for file in files):,} | {num_tokens[split]:,} |"
        for split, files in _splits(corpus)
    ]
    sample_rows = [f"| {file.package} | {by_name[file.package].licence} | {file.path} |" for file in sample]
    dropped_rows = [f"| {reason} | {count:,} |" for reason, count in corpus.dropped.most_common()]
    return "\n".join(
        [
            "# Training data of the demo models",
            "",
            "Written by `models/train.py`. The data are the Python source files of the standard library and of the",
            "packages that were installed on the training machine under a permissive licence, as the metadata of each",
            "package states it. Tests are left out. The files themselves are not part of this repository, except the",
            "small held-out sample.",
            "",
            "## Split",
            "",
            f"A file is held out if the SHA-256 of its content falls in {HELDOUT_PER_MILLE} of 1000 parts, and unless",
            "over half of its longer lines also stand in training files (a near copy; it is left out of both).",
            f"The packages {', '.join(sorted(UNSEEN_PACKAGES))} are kept out of training as a whole (`unseen`).",
            "",
            "| split | files | bytes | tokens |",
            "|---|---:|---:|---:|",
            *split_rows,
            "",
            "## Packages",
            "",
            "| package | version | licence | training files | held-out files | bytes |",
            "|---|---|---|---:|---:|---:|",
            *rows,
            "",
            "## Files left out",
            "",
            "| reason | files |",
            "|---|---:|",
            *dropped_rows,
            "",
            "Packages left out because their metadata states no licence or one that is not on the list of permissive",
            f"ones: {', '.join(corpus.refused_packages) or 'none'}.",
            "",
            "## The held-out sample, `models/heldout/`",
            "",
            "None of these files was trained on. Each folder holds the package's licence text as `LICENCE.txt`.",
            "",
            "| package | licence | file |",
            "|---|---|---|",
            *sample_rows,
            "",
        ]
    )


def _say(start: float, text: str) -> None:
    print(f"[data {time.monotonic() - start:6.1f} s] {text}", flush=True)
