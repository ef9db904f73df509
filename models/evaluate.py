"""Measure the demo models: `python -m models.evaluate [--heldout models/heldout] [--output FILE]`.

Held-out loss of both, acceptance of the draft model and of n-gram drafting where the target continues held-out files,
and samples of the target. Everything runs in float32 on the saved bf16 weights.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from models.acceptance import AcceptanceCount, ngram_draft, replay
from models.corpus import SourceFile
from models.dataset import read_files
from models.demo_model import END_OF_TEXT_ID, DemoModel, continue_rows, load_model
from models.noise import gumbel_noise
from models.tokenizer import encode_files, pack_files

PROMPT_TOKENS = 256
DRAFT_LENGTHS = (3, 5)
TEMPERATURES = (0.0, 0.8)
SAMPLE_TEMPERATURE = 0.6
# None ends in a newline: the tokenizer joins it to the next line's indentation, so a newline of its own at the end
# of a prompt tells the model that the next line is not indented.
SAMPLE_PROMPTS = (
    'import json\n\n\ndef read_config(path):\n    """Read a JSON file and return its settings as a dictionary."""',
    "class LinkedList:\n    def __init__(self):\n        self.head = None\n\n    def append(self,",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
)


def main() -> None:
    options = _parse_options()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(str(options.models / "demo-target" / "tokenizer.json"))
    target = load_model(options.models / "demo-target", device, torch.float32)
    draft = load_model(options.models / "demo-draft", device, torch.float32)
    report: dict[str, object] = {"heldout": measure_loss(target, draft, tokenizer, read_files(options.heldout))}
    if options.unseen is not None:
        report["unseen"] = measure_loss(target, draft, tokenizer, read_files(options.unseen))
    prompts = _prompts(tokenizer, read_files(options.heldout), options.rows).to(device)
    acceptance = [
        entry
        for temperature in TEMPERATURES
        for entry in measure_acceptance(target, draft, prompts, options.new_tokens, temperature)
    ]
    report["acceptance"] = {"prompts": len(prompts), "new_tokens": options.new_tokens, "results": acceptance}
    report["samples"] = [write_sample(target, tokenizer, prompt) for prompt in SAMPLE_PROMPTS]
    text = json.dumps(report, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


@torch.no_grad()
def measure_loss(
    target: DemoModel, draft: DemoModel, tokenizer: Tokenizer, files: list[SourceFile]
) -> dict[str, object]:
    """Loss of both models over the files as one stream, each with the end-of-text token before it.

    The stream is cut into windows of the models' full length. Nats are per token, bits per byte of source text.
    """
    device = next(target.parameters()).device
    stream = torch.from_numpy(pack_files(tokenizer, files)).to(device).long()
    num_bytes = sum(file.num_bytes for file in files)
    result: dict[str, object] = {"files": len(files), "bytes": num_bytes, "tokens": len(stream)}
    for name, model in (("target", target), ("draft", draft)):
        length = model.shape.max_position_embeddings
        nats = 0.0
        for start in range(0, len(stream) - 1, length):
            window = stream[start : start + length + 1]
            logits = model(window[None, :-1])[0]  # [window_len, vocab]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
        result[name] = {
            "nats_per_token": nats / (len(stream) - 1),
            "bits_per_byte": nats / math.log(2) / num_bytes,
        }
    return result


def measure_acceptance(
    target: DemoModel, draft: DemoModel, prompts: Tensor, num_new_tokens: int, temperature: float
) -> list[dict[str, object]]:
    """Acceptance where the target continues prompts [rows, prompt_len] int64, greedily or with shared noise."""

    def scores(logits: Tensor, position: int) -> Tensor:
        if temperature == 0:
            return logits
        return logits / temperature + gumbel_noise(logits, seed=7, position=position)

    def choose(logits: Tensor, position: int) -> Tensor:
        return scores(logits, position).argmax(-1)

    rows = continue_rows(target, prompts, num_new_tokens, choose, torch.float32)
    prompt_len = prompts.shape[1]
    with torch.no_grad():
        logits = draft(rows[:, :-1])[:, prompt_len - 1 :]  # [rows, num_new_tokens, vocab]
        drafted = torch.stack([choose(logits[:, i], prompt_len + i) for i in range(num_new_tokens)], dim=1)
    # Column p of `follows` is the draft model's choice for position p when the text before p is given.
    follows = torch.cat((prompts, drafted), dim=1).cpu().numpy()
    texts = [_until_end(row, prompt_len) for row in rows.cpu().numpy()]
    results: list[dict[str, object]] = []
    for k in DRAFT_LENGTHS:
        from_model, from_ngram = AcceptanceCount(k), AcceptanceCount(k)
        for text, follow in zip(texts, follows, strict=True):
            # After a wrong draft token the rest of a draft differs from `follow`, but it is rejected anyway.
            replay(text.tolist(), prompt_len, lambda n, f=follow, k=k: f[n : n + k].tolist(), from_model)
            replay(text.tolist(), prompt_len, lambda n, t=text, k=k: ngram_draft(t[:n], k), from_ngram)
        for method, count in (("draft model", from_model), ("n-gram", from_ngram)):
            results.append({"method": method, "temperature": temperature, "k": k, **count.summary()})
    return results


def write_sample(target: DemoModel, tokenizer: Tokenizer, prompt: str, num_new_tokens: int = 160) -> dict[str, str]:
    """One continuation at temperature 0.6 with a fixed seed, cut at the end-of-text token."""
    ids = [END_OF_TEXT_ID, *tokenizer.encode(prompt).ids]
    device = next(target.parameters()).device

    def choose(logits: Tensor, position: int) -> Tensor:
        return (logits / SAMPLE_TEMPERATURE + gumbel_noise(logits, seed=0, position=position)).argmax(-1)

    rows = continue_rows(target, torch.tensor([ids], device=device), num_new_tokens, choose, torch.float32)
    text = _until_end(rows[0].cpu().numpy(), len(ids))
    return {"prompt": prompt, "continuation": tokenizer.decode(text[len(ids) :].tolist())}


def _prompts(tokenizer: Tokenizer, files: list[SourceFile], max_rows: int) -> Tensor:
    """Prompts [rows, PROMPT_TOKENS]: of each file the tokens from its first quarter on, past headers and imports."""
    prompts = [
        ids[start : start + PROMPT_TOKENS]
        for ids in encode_files(tokenizer, files)
        if (start := min(len(ids) // 4, len(ids) - PROMPT_TOKENS)) >= 0
    ]
    return torch.tensor(prompts[:max_rows])


def _until_end(row: NDArray[np.int64], prompt_len: int) -> NDArray[np.int64]:
    ends = np.flatnonzero(row[prompt_len:] == END_OF_TEXT_ID)
    return row[: prompt_len + int(ends[0])] if len(ends) else row


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the demo models.")
    parser.add_argument("--models", type=Path, default=Path("models"), help="folder of demo-target and demo-draft")
    parser.add_argument("--heldout", type=Path, default=Path("models/heldout"), help="a folder, or a .jsonl file")
    parser.add_argument("--unseen", type=Path, help="files of packages that were never trained on")
    parser.add_argument("--rows", type=int, default=200, help="prompts for acceptance, one a file")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens that the target writes for each prompt")
    parser.add_argument("--output", type=Path, help="write the JSON here too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
