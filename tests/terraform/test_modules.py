"""Every module through every step of the checker, as a root of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.terraform.support import MODULES, STATIC, STEPS, VARIABLES, assert_sound, check

_NAMES = sorted(path.name for path in MODULES.iterdir() if list(path.glob("*.tf")))
_CASES = sorted(VARIABLES.glob("*.json"))
# By default these go all the way, since they are no part of the small size, which does (test_roots.py); the others are
# validated and their own tests run.
_ALL_THE_WAY = {"shared_files.lustre", "valkey.serverless"}


def _module(case: Path) -> str:
    return case.stem.partition(".")[0]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.stem, marks=[] if c.stem in _ALL_THE_WAY else [pytest.mark.slow]) for c in _CASES]
)
def test_module_from_format_to_destroy(case: Path) -> None:
    assert_sound(check(MODULES / _module(case), f"--var-file={case}"), STEPS)


@pytest.mark.parametrize("name", sorted(set(_NAMES) - {name.partition(".")[0] for name in _ALL_THE_WAY}))
def test_module_is_valid_and_passes_its_tests(name: str) -> None:
    assert_sound(check(MODULES / name, steps=STATIC), STATIC)


def test_every_module_goes_all_the_way_in_some_case() -> None:
    assert {_module(case) for case in _CASES} == set(_NAMES)


@pytest.mark.parametrize("name", _NAMES)
def test_every_variable_and_output_says_what_it_is(name: str) -> None:
    for file, kind in (("variables.tf", "variable"), ("outputs.tf", "output")):
        if not (MODULES / name / file).exists():
            continue
        blocks = (MODULES / name / file).read_text().split(f'\n{kind} "')
        for block in blocks[1:] if not blocks[0].startswith(f'{kind} "') else blocks:
            assert "description" in block, f"{name}/{file}: {block.splitlines()[0]} has no description"
            assert kind == "output" or "type " in block, f"{name}/{file}: {block.splitlines()[0]} has no type"
