"""Loading safetensors: the right values in the merged matrices, little memory, and a clear error for a broken file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.errors import ModelLoadError
from model_executor.models.config import load_model_config
from model_executor.models.parameters import allocate_parameters, checkpoint_targets
from model_executor.models.registry import load_model
from model_executor.models.weights import INDEX_FILE, SINGLE_FILE, load_weights
from tests.unit.model_executor.conftest import ModelMaker

CPU = torch.device("cpu")


@pytest.fixture
def single(tiny_model: ModelMaker, tmp_path: Path) -> Path:
    """A copy of a model in one file, which the test may break."""
    return Path(shutil.copytree(tiny_model("LlamaForCausalLM"), tmp_path / "single"))


@pytest.fixture
def sharded(tiny_model: ModelMaker, tmp_path: Path) -> Path:
    """A copy of a model in several shards, which the test may break."""
    directory = tiny_model("LlamaForCausalLM", max_shard_size="100KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return Path(shutil.copytree(directory, tmp_path / "sharded"))


def edit_single(directory: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, directory / SINGLE_FILE)


def assert_refused(directory: Path, *parts: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        load_model(directory, progress=False)
    for part in (str(directory), *parts):
        assert re.search(re.escape(part), str(caught.value)), f"{part!r} is not in: {caught.value}"


def test_shards_and_single_file_fill_the_same_parameters(tiny_model: ModelMaker, single: Path) -> None:
    config = load_model_config(single)
    loaded: list[dict[str, Tensor]] = []
    for directory in (single, tiny_model("LlamaForCausalLM", max_shard_size="100KB")):
        targets = checkpoint_targets(allocate_parameters(config, torch.float32, CPU), config)
        load_weights(directory, targets, progress=False)
        loaded.append(targets)
    stored = load_file(single / SINGLE_FILE)
    assert set(loaded[0]) == set(stored)
    for name, tensor in stored.items():
        assert torch.equal(loaded[0][name], tensor)
        assert torch.equal(loaded[1][name], tensor)


def test_parts_stand_in_one_merged_matrix(single: Path) -> None:
    config = load_model_config(single)
    parameters = allocate_parameters(config, torch.float32, CPU)
    load_weights(single, checkpoint_targets(parameters, config), progress=False)
    stored = load_file(single / SINGLE_FILE)
    attention, mlp = "model.layers.1.self_attn", "model.layers.1.mlp"
    qkv = torch.cat([stored[f"{attention}.{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([stored[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(parameters.layers[1].qkv, qkv)
    assert torch.equal(parameters.layers[1].gate_up, gate_up)


def test_dtype_is_converted_on_the_way(single: Path) -> None:
    config = load_model_config(single)
    targets = checkpoint_targets(allocate_parameters(config, torch.bfloat16, CPU), config)
    load_weights(single, targets, progress=False)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(targets[name], load_file(single / SINGLE_FILE)[name].bfloat16())


def test_harmless_tensors_are_ignored(tiny_model: ModelMaker, tmp_path: Path) -> None:
    tied = Path(shutil.copytree(tiny_model("LlamaForCausalLM", tie_word_embeddings=True), tmp_path / "tied"))
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_single(tied, lambda tensors: tensors.update({name: torch.ones(8), "lm_head.weight": torch.ones(320, 64)}))
    load_model(tied, progress=False)


def test_unexpected_tensor(single: Path) -> None:
    edit_single(single, lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.ones(160, 64)}))
    assert_refused(single, SINGLE_FILE, "unexpected tensor 'model.layers.2.mlp.up_proj.weight'")


def test_missing_tensor(single: Path) -> None:
    edit_single(single, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    assert_refused(single, "model.layers.1.self_attn.k_proj.weight missing from model.safetensors")


def test_many_missing_tensors_are_counted(single: Path) -> None:
    edit_single(single, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1." in name])
    assert_refused(single, "and 4 more missing from")


def test_missing_head_of_an_untied_model(single: Path) -> None:
    edit_single(single, lambda tensors: tensors.pop("lm_head.weight"))
    assert_refused(single, "lm_head.weight missing")


def test_tensor_of_the_wrong_shape(single: Path) -> None:
    edit_single(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(65)}))
    assert_refused(single, "'model.norm.weight' has shape [65], expected [64]")


def test_tensor_of_a_dtype_that_is_no_weight(single: Path) -> None:
    edit_single(single, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    assert_refused(single, "'model.norm.weight' has dtype I8, expected one of F64, F32, F16, BF16")


def test_missing_shard_is_found_before_anything_is_read(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = max(sharded.glob("model-*.safetensors"))
    shard.unlink()
    monkeypatch.setattr("model_executor.models.weights.safe_open", lambda *_, **__: pytest.fail("a shard was read"))
    assert_refused(sharded, INDEX_FILE, f"{shard.name} missing")


def test_index_naming_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    shards = sorted(set(index["weight_map"].values()))
    name = next(tensor for tensor, shard in index["weight_map"].items() if shard == shards[0])
    index["weight_map"][name] = shards[1]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    assert_refused(sharded, shards[1], f"{name} missing, though {INDEX_FILE} names this file")


@pytest.mark.parametrize("value", ["../other.safetensors", "/etc/passwd", "weights.bin", 3])
def test_index_naming_a_file_elsewhere(sharded: Path, value: object) -> None:
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": {"model.norm.weight": value}}))
    assert_refused(sharded, INDEX_FILE, repr(value))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}'])
def test_broken_index(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    assert_refused(sharded, INDEX_FILE)


def test_same_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(second) | {name: tensors[name]}, second)
    assert_refused(sharded, f"tensor {name!r} is in the checkpoint twice")


@pytest.mark.parametrize("size", [0, 5, 200, -1])
def test_truncated_file(single: Path, size: int) -> None:
    content = (single / SINGLE_FILE).read_bytes()
    (single / SINGLE_FILE).write_bytes(content[:size])
    assert_refused(single, SINGLE_FILE, "is not a readable safetensors file")


def test_file_of_noise(single: Path) -> None:
    (single / SINGLE_FILE).write_bytes(b"\x7fnoise" * 100)
    assert_refused(single, SINGLE_FILE, "is not a readable safetensors file")


def test_pickled_weights_are_refused(single: Path) -> None:
    (single / SINGLE_FILE).rename(single / "pytorch_model.bin")
    assert_refused(single, "found pytorch_model.bin", "convert them to safetensors")


def test_no_weights_at_all(single: Path) -> None:
    (single / SINGLE_FILE).unlink()
    assert_refused(single, "expected model.safetensors or model.safetensors.index.json, found config.json")


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX_FILE).unlink()
    assert_refused(sharded, "expected model.safetensors", "without an index")


def test_progress_is_silent_where_there_is_no_terminal(single: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(single, progress=True)
    assert capsys.readouterr().err == ""


def test_model_is_never_twice_in_memory(tiny_model: ModelMaker) -> None:
    """Peak resident memory while loading: the model, one shard, and one layer that is being packed."""
    clear_refs, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not status.exists():
        pytest.skip("peak memory is read from /proc")
    directory = tiny_model(
        "LlamaForCausalLM",
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        max_shard_size="6MB",
        dtype=torch.bfloat16,
    )
    load_model_config(directory)  # imports what it needs
    model_bytes = 2 * sum(file.stat().st_size for file in directory.glob("*.safetensors"))  # float32 in memory
    assert model_bytes > 80e6

    def read(name: str) -> int:
        return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", status.read_text())[1])  # pyright: ignore

    try:
        clear_refs.write_text("5")  # resets the peak
    except OSError:
        pytest.skip("the peak cannot be reset here")
    before = read("VmRSS")
    decoder = load_model(directory, progress=False)
    peak = read("VmHWM") - before
    assert decoder.config.num_layers == 8
    assert peak < 1.3 * model_bytes, f"peak {peak / 1e6:.0f} MB for a model of {model_bytes / 1e6:.0f} MB"
