"""What the README shows runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"\b[A-Z]+_(?:OUTPUT|FIGURES)\b", TEXT)


def test_links_lead_somewhere() -> None:
    for page in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/figures.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


# By name, and not by a path: `pip install kvstore`, `pip install -U 'kvstore[s3]'`, `'kvstore[s3]'` by itself.
_BY_NAME = re.compile(r"""pip3? install [^\n`#]*?(?<![\w/.-])kvstore(?![\w-])|['"`]kvstore\[(?![^\n]*\] @ file:)""")


def test_nobody_is_told_to_install_what_has_our_name_on_the_public_index() -> None:
    """`kvstore` there is a stranger's project."""
    for bad in ("pip install kvstore  # x", "pip install -U 'kvstore[s3]'", "`'kvstore[s3]'` brings boto3"):
        assert _BY_NAME.search(bad), bad
    for good in (
        "pip install -c constraints.txt '.[s3]'  # kvstore", "pip install dist/kvstore-*.whl",
        'pip install "$(ls dist/kvstore-*.whl)[s3]"', '"kvstore[$4] @ file://$(pwd)"',
    ):  # fmt: skip
        assert not _BY_NAME.search(good), good
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder in ("docs", "examples", "deploy"):
        pages += [path for path in sorted((ROOT / folder).rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    assert len(pages) > 40
    found = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in pages
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if _BY_NAME.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("block", [block for block in BLOCKS if "memory://" in block])
def test_snippets_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_BUFFER_POOL_BYTES", "1MiB")
    space: dict[str, Any] = {"kvstore": __import__("kvstore")}
    exec(compile(block, "README.md", "exec"), space)  # noqa: S102


@pytest.mark.leaves("torch keeps threads of its own")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_transformers_snippet_runs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from kvstore.testing.models import tiny_model

    (block,) = [block for block in BLOCKS if "KVCacheStore" in block]
    model = tiny_model("llama")
    ids = torch.randint(3, 1000, (1, 300), generator=torch.Generator().manual_seed(0))
    block = block.replace("file:///mnt/kv?bytes=400GiB", f"file://{tmp_path}?bytes=1GiB")
    hits = []
    for _ in range(2):
        space: dict[str, Any] = {"model": model, "input_ids": ids}
        exec(compile(block, "README.md", "exec"), space)  # noqa: S102
        hits.append(space["hit_tokens"])
    assert hits == [0, 256]
