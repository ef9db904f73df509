"""The committed demo models: their files, their sizes, and the same logits from transformers."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from models.dataset import read_files
from models.demo_model import END_OF_TEXT_ID, continue_rows, load_model

MODELS = Path(__file__).parents[3] / "models"
DIRECTORIES = ("demo-target", "demo-draft")
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", DIRECTORIES)
def test_config_names_the_architecture_and_fits_its_tokenizer(name: str) -> None:
    config = json.loads((MODELS / name / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == tokenizer.get_vocab_size()
    assert config["eos_token_id"] == config["bos_token_id"] == tokenizer.token_to_id("<|endoftext|>") == END_OF_TEXT_ID


def test_both_models_have_the_same_tokenizer() -> None:
    first, second = ((MODELS / name / "tokenizer.json").read_bytes() for name in DIRECTORIES)
    assert first == second


def test_sizes_are_within_their_limits() -> None:
    files = [path for path in MODELS.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= 30_000_000
    assert max(path.stat().st_size for path in files if path.suffix == ".safetensors") <= 15_000_000
    assert sum(path.stat().st_size for path in (MODELS / "heldout").rglob("*.txt")) <= 200_000


def test_the_target_is_sharded_as_its_index_says() -> None:
    index = json.loads((MODELS / "demo-target" / "model.safetensors.index.json").read_text())
    on_disk = {path.name for path in (MODELS / "demo-target").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == on_disk
    assert len(on_disk) == 2


def test_the_tokenizer_gives_every_held_out_file_back() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "demo-target")
    files = read_files(MODELS / "heldout")
    assert 20 <= len(files) <= 40
    texts = [file.text for file in files] + [
        "  a ,  b !\n\tx='s , t' . n't\r\n\u00e9\u4e2d\U0001f600  ",
        " lead",
        "a\n\n\n",
    ]
    for text in texts:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", DIRECTORIES)
def test_transformers_gives_the_same_logits_and_greedy_text(name: str) -> None:
    ours = load_model(MODELS / name, CPU, torch.float32)
    theirs = LlamaForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(MODELS / name / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode(read_files(MODELS / "heldout")[0].text).ids[:96]])
    rows = continue_rows(ours, prompt, 12, lambda logits, _: logits.argmax(-1), torch.float32)
    with torch.no_grad():
        expected = theirs(rows).logits  # [1, 108, vocab]
        torch.testing.assert_close(ours(rows), expected, rtol=0, atol=1e-3)
    assert torch.equal(rows[:, 96:], expected[:, 95:-1].argmax(-1))
