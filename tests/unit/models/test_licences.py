"""Which licences count as permissive."""

import pytest

from models.licences import spdx_is_permissive


@pytest.mark.parametrize(
    ("expression", "permissive"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("MPL-2.0 AND MIT", False),
        ("GPL-3.0-or-later", False),
        ("Apache-2.0 WITH LLVM-exception AND (MIT OR LGPL-2.1-only)", True),
        ("(MIT OR BSD-3-Clause) AND LGPL-2.1-only", False),
        ("MIT AND", False),
        ("", False),
        ("LicenseRef-Proprietary", False),
    ],
)
def test_spdx_expressions(expression: str, permissive: bool) -> None:
    assert spdx_is_permissive(expression) is permissive
