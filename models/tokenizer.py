"""The byte-level BPE tokenizer of both demo models, and files as one stream of its tokens."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from models.corpus import SourceFile
from models.demo_model import END_OF_TEXT_ID

VOCAB_SIZE = 6144
END_OF_TEXT = "<|endoftext|>"
# The models know files, not conversations: the text of all messages is where a file begins.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
)
# What the trainer reads of the corpus; 6144 merges do not change with more.
_MAX_TRAINING_BYTES = 60_000_000
_BATCH_FILES = 1024


def train_tokenizer(files: Sequence[SourceFile]) -> Tokenizer:
    """Learn the merges from an even share of the files."""
    total = sum(len(file.text) for file in files)
    step = max(1, round(total / _MAX_TRAINING_BYTES))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        # Every byte is a token, so any text can be encoded and comes back as it was.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.text for file in files[::step]), trainer)
    if tokenizer.token_to_id(END_OF_TEXT) != END_OF_TEXT_ID:
        raise ValueError(f"{END_OF_TEXT}: id {tokenizer.token_to_id(END_OF_TEXT)}, expected {END_OF_TEXT_ID}")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the two files that transformers' AutoTokenizer reads."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode_files(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> Iterator[list[int]]:
    """Token ids of each file; raises ValueError if a file does not come back byte for byte."""
    for start in range(0, len(files), _BATCH_FILES):
        texts = [file.text for file in files[start : start + _BATCH_FILES]]
        encoded = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        decoded = tokenizer.decode_batch(encoded, skip_special_tokens=False)
        for file, before, after in zip(files[start:], texts, decoded, strict=False):
            if before != after:
                raise ValueError(f"{file.package}/{file.path}: does not come back from the tokenizer as it was")
        yield from encoded


def pack_files(tokenizer: Tokenizer, files: Sequence[SourceFile]) -> NDArray[np.int16]:
    """One stream [num_tokens] int16: the end-of-text token before every file."""
    parts = [np.array([END_OF_TEXT_ID, *ids], dtype=np.int16) for ids in encode_files(tokenizer, files)]
    return np.concatenate(parts)
