"""Train the demo models: `python -m models.train data|target|draft|all --work DIR [--out models]`.

`data` collects the corpus and trains the tokenizer, `target` trains on it, `draft` lets the target write text and
distils the draft model from it. Intermediate files stay under --work; the model directories, DATA.md and the
held-out sample go under --out.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.dataset import prepare_data
from models.demo_model import END_OF_TEXT_ID, DemoModel, LlamaShape, continue_rows, load_model, save_model
from models.noise import gumbel_noise
from models.training import TokenStream, TrainResult, TrainSettings, distillation_loss, language_loss, train_model

TARGET = LlamaShape(
    hidden_size=384, num_hidden_layers=6, num_attention_heads=6, num_key_value_heads=2, intermediate_size=1024
)
DRAFT = LlamaShape(
    hidden_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384
)
TINY = LlamaShape(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128
)
_PROMPT_TOKENS = 256


def main() -> None:
    options = _parse_options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if options.stage in ("data", "all"):
        prepare_data(options.work, options.out, options.max_files, os.cpu_count() or 1)
    if options.stage in ("target", "all"):
        _train_target(options, device)
    if options.stage in ("draft", "all"):
        _train_draft(options, device)


def _train_target(options: argparse.Namespace, device: torch.device) -> None:
    settings = TrainSettings(
        minutes=options.minutes, peak_lr=2e-3, rows=options.rows, length=options.length, compile=options.compile
    )
    model = DemoModel(TINY if options.tiny else TARGET).to(device)
    batches = TokenStream(_load_stream(options, "train", device), settings.rows, settings.length, seed=1).batches()
    heldout = _load_stream(options, "heldout", device)
    checkpoint = options.work / "target.pt"
    result = train_model("target", model, language_loss(model), batches, heldout, settings, checkpoint)
    save_model(model, options.out / "demo-target")
    _record(options, "target", model, result)


def _train_draft(options: argparse.Namespace, device: torch.device) -> None:
    settings = TrainSettings(
        minutes=options.draft_minutes, peak_lr=4e-3, rows=options.rows, length=options.length, compile=options.compile
    )
    teacher = load_model(options.out / "demo-target", device, torch.float32)
    teacher.requires_grad_(False)
    train = _load_stream(options, "train", device)
    written = _write_text(teacher, train, options, device)
    print(f"[draft] the target wrote {len(written):,} tokens", flush=True)
    half = settings.rows // 2
    from_files = TokenStream(train, half, settings.length, seed=2).batches()
    from_target = TokenStream(written, half, settings.length, seed=3).batches()
    model = DemoModel(TINY if options.tiny else DRAFT).to(device)
    heldout = _load_stream(options, "heldout", device)
    loss = distillation_loss(model, teacher)
    batches = _join(from_files, from_target)
    result = train_model("draft", model, loss, batches, heldout, settings, options.work / "draft.pt")
    save_model(model, options.out / "demo-draft")
    _record(options, "draft", model, result)


def _write_text(teacher: DemoModel, train: Tensor, options: argparse.Namespace, device: torch.device) -> Tensor:
    """Text of the target, continuing prompts from training files: a stream [num_tokens] int16.

    Rounds alternate between greedy and temperature 0.8, as the draft model will meet both.
    """
    prompts = TokenStream(train, options.generate_rows, _PROMPT_TOKENS, seed=4).batches()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    parts: list[Tensor] = []
    start = time.monotonic()
    while not parts or time.monotonic() - start < options.generate_minutes * 60:
        noise_seed = len(parts)

        def choose(logits: Tensor, position: int, noise_seed: int = noise_seed) -> Tensor:
            if noise_seed % 2 == 0:
                return logits.argmax(-1)
            return (logits / 0.8 + gumbel_noise(logits, seed=noise_seed, position=position)).argmax(-1)

        with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
            rows = continue_rows(teacher, next(prompts)[0], options.generate_tokens, choose, dtype)
        ends = torch.full((len(rows), 1), END_OF_TEXT_ID, device=device)
        parts.append(torch.cat((ends, rows), dim=1).to(torch.int16).flatten())
    return torch.cat(parts)


def _join(
    first: Iterator[tuple[Tensor, Tensor]], second: Iterator[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for (inputs_a, labels_a), (inputs_b, labels_b) in zip(first, second, strict=True):
        yield torch.cat((inputs_a, inputs_b)), torch.cat((labels_a, labels_b))


def _load_stream(options: argparse.Namespace, split: str, device: torch.device) -> Tensor:
    return torch.from_numpy(np.load(options.work / f"{split}.npy")).to(device)


def _record(options: argparse.Namespace, name: str, model: DemoModel, result: TrainResult) -> None:
    record = {"parameters": model.num_parameters, "shape": asdict(model.shape), **asdict(result)}
    (options.work / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo models.")
    parser.add_argument("stage", choices=("data", "target", "draft", "all"))
    parser.add_argument("--work", type=Path, required=True, help="folder for streams, checkpoints and records")
    parser.add_argument("--out", type=Path, default=Path("models"), help="folder of the model directories")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time of the target")
    parser.add_argument("--draft-minutes", type=float, default=4.0, help="training time of the draft model")
    parser.add_argument("--generate-minutes", type=float, default=1.0, help="time in which the target writes text")
    parser.add_argument("--generate-rows", type=int, default=4096, help="rows that the target continues at once")
    parser.add_argument("--generate-tokens", type=int, default=768, help="tokens written for each row")
    parser.add_argument("--rows", type=int, default=64, help="windows per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per window")
    parser.add_argument("--max-files", type=int, help="use about this many files (for trials)")
    parser.add_argument("--tiny", action="store_true", help="train very small models (for trials)")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="do not use torch.compile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
