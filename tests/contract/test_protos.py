"""The committed code is what the protos generate, and the protos say what each field means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from common.draft_exchange import PROTOCOL_VERSION
from common.protos.outrider.v1 import drafter_pb2 as pb

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "protos" / "outrider" / "v1" / "drafter.proto"

# Numbers of fields, as they were published: they are never reused.
FIELDS = {
    "VerifierFrame": {"sequence": 1, "hello": 2, "closed": 3, "opened": 4, "committed": 5},
    "DrafterFrame": {"answered_sequence": 1, "hello_ack": 2, "branches": 3, "row_errors": 4, "load": 5},
    "CommitBatch": {"row": 1, "generation": 2, "base_len": 3, "num_tokens": 4, "token_ids": 5},
    "BranchBatch": {"row": 1, "generation": 2, "base_len": 3, "num_tokens": 4, "token_ids": 5},
    "CloseBatch": {"row": 1, "generation": 2},
}


def test_generated_code_is_current(tmp_path: Path) -> None:
    names = [str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto")]
    assert names
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Icommon/protos={ROOT / 'protos'}"]
    command += [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", *(f"common/protos/{name}" for name in names)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    generated = [path.relative_to(tmp_path) for path in tmp_path.rglob("*.py*")]
    assert len(generated) == 2 * len(names)
    for path in generated:
        assert (ROOT / path).read_text() == (tmp_path / path).read_text(), f"{path}: run `make protos`"


def test_field_numbers_stay() -> None:
    for message, fields in FIELDS.items():
        descriptor = pb.DESCRIPTOR.message_types_by_name[message]
        assert {field.name: field.number for field in descriptor.fields} == fields
    assert PROTOCOL_VERSION == 1


def test_the_service_is_named_by_its_package() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert service.full_name == "outrider.v1.Drafter"
    assert [method.name for method in service.methods] == ["Info", "Session"]
