"""Reading safetensors into preallocated parameters: shard by shard, never the model twice in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from common.errors import ModelLoadError
from model_executor.models.config import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = ("F64", "F32", "F16", "BF16")

# Known and harmless: a buffer that old checkpoints carry and every decoder computes for itself.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_TIED = "lm_head.weight"


def load_weights(directory: str | Path, targets: Mapping[str, Tensor], progress: bool = True) -> None:
    """Copy every tensor of the checkpoint in `directory` into its target, converting the dtype on the way.

    A shard is mapped, copied tensor by tensor and unmapped before the next one is opened.

    Args:
        directory: holds model.safetensors, or model.safetensors.index.json and its shards.
        targets: checkpoint tensor name -> the tensor that receives it. All must be found.
        progress: show a bar of shards and tensors, if standard error is a terminal.

    Raises:
        ModelLoadError: a shard or a tensor is missing, unexpected, of another shape, or a file is broken; names the
            file and the tensor, what was expected and what was found.
    """
    directory = Path(directory)
    expected = _find_shards(directory)
    missing = set(targets)
    # disable=None: tqdm shows nothing where standard error is not a terminal.
    with tqdm(total=len(targets), desc="Loading weights", unit="tensor", disable=None if progress else True) as bar:
        for shard, names in expected.items():
            _load_shard(directory / shard, names, targets, missing, bar)
    if missing:
        raise ModelLoadError(f"{directory}: {_listed(missing)} missing from {', '.join(expected)}")


def _find_shards(directory: Path) -> dict[str, set[str] | None]:
    """Shard file name -> the tensors that the index says it holds; None where there is no index."""
    if (directory / INDEX_FILE).is_file():
        return _read_index(directory / INDEX_FILE)
    if (directory / SINGLE_FILE).is_file():
        return {SINGLE_FILE: None}
    found = sorted(entry.name for entry in directory.iterdir())
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    shards = [name for name in found if name.endswith(".safetensors")]
    wanted = f"expected {SINGLE_FILE} or {INDEX_FILE}"
    if shards:
        raise ModelLoadError(f"{directory}: {wanted}, found {', '.join(shards[:10])} without an index")
    if pickles:
        text = "pickled weights are not loaded, since loading them can run code; convert them to safetensors"
        raise ModelLoadError(f"{directory}: {wanted}, found {', '.join(pickles[:10])}; {text}")
    raise ModelLoadError(f"{directory}: {wanted}, found {', '.join(found[:10])}")


def _read_index(path: Path) -> dict[str, set[str] | None]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path}: expected an object 'weight_map' of tensor and file names")
    shards: dict[str, set[str]] = {}
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or Path(shard).name != shard:
            text = "expected the name of a .safetensors file in the same directory"
            raise ModelLoadError(f"{path}: weight_map[{tensor!r}] = {shard!r}: {text}")
        shards.setdefault(shard, set()).add(tensor)
    # All shards are looked for before the first one is read: reading may take minutes.
    absent = {shard for shard in shards if not (path.parent / shard).is_file()}
    if absent:
        raise ModelLoadError(f"{path} names {len(shards)} shards: {_listed(absent)} missing from {path.parent}")
    return {shard: shards[shard] for shard in sorted(shards)}


def _load_shard(
    path: Path, names: set[str] | None, targets: Mapping[str, Tensor], missing: set[str], bar: tqdm[Any]
) -> None:
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            found = set(shard.keys())
            if names is not None and names - found:
                raise ModelLoadError(f"{path}: {_listed(names - found)} missing, though {INDEX_FILE} names this file")
            bar.set_postfix_str(path.name)
            # In the order of the file: reading a mapped file forwards is fastest.
            for name in shard.offset_keys():
                if _is_ignored(name, targets):
                    continue
                if name not in targets:
                    raise ModelLoadError(f"{path}: unexpected tensor {name!r}; this architecture has none of that name")
                if name not in missing:
                    raise ModelLoadError(f"{path}: tensor {name!r} is in the checkpoint twice")
                _copy_tensor(shard, path, name, targets[name])
                missing.remove(name)
                bar.update()
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error


def _copy_tensor(shard: Any, path: Path, name: str, target: Tensor) -> None:
    header = shard.get_slice(name)
    shape, dtype = list(header.get_shape()), header.get_dtype()
    if shape != list(target.shape):
        raise ModelLoadError(f"{path}: tensor {name!r} has shape {shape}, expected {list(target.shape)}")
    if dtype not in _DTYPES:
        raise ModelLoadError(f"{path}: tensor {name!r} has dtype {dtype}, expected one of {', '.join(_DTYPES)}")
    target.copy_(shard.get_tensor(name))


def _is_ignored(name: str, targets: Mapping[str, Tensor]) -> bool:
    return bool(_IGNORED.search(name)) or (name == _TIED and _TIED not in targets)


def _listed(names: set[str], limit: int = 5) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
