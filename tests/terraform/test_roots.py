"""The sizes: each is validated and its own tests run; the small one goes all the way, from format to destroy."""

from __future__ import annotations

import pytest

from tests.terraform.support import STATIC, STEPS, TERRAFORM, VARIABLES, assert_sound, check

_ROOTS = ["small", "medium", "large"]
_ALSO_APPLIED = "small"  # the others are applied when there is time


def test_every_root_is_listed_here() -> None:
    found = sorted(path.name for path in TERRAFORM.iterdir() if list(path.glob("*.tf")))
    assert found == sorted(_ROOTS)


@pytest.mark.parametrize("root", [name for name in _ROOTS if name != _ALSO_APPLIED])
def test_root_is_valid(root: str) -> None:
    assert_sound(check(TERRAFORM / root, steps=STATIC), STATIC)


@pytest.mark.parametrize(
    "root", [pytest.param(name, marks=[] if name == _ALSO_APPLIED else [pytest.mark.slow]) for name in _ROOTS]
)
def test_root_from_format_to_destroy(root: str) -> None:
    assert_sound(check(TERRAFORM / root, f"--var-file={VARIABLES / 'roots' / f'{root}.json'}"), STEPS)
