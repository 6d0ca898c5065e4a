"""`kvstore ctl context`: the context of records, read from one of them, makes their keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import Item, Key, KeyContext, KVLayout, chunk_keys, kv_spec
from kvstore_cli.ctl import context_of
from kvstore_cli.main import main

TOKENS = range(40)


def _stored(folder: Path, layout: KVLayout, without: Sequence[str] = (), **fields: Any) -> tuple[KeyContext, list[Key]]:
    """Two chunks of 16 tokens and one of 8, described as the engines' integrations do it."""
    folder.mkdir()
    with kvstore.open_store(f"file://{folder}") as store:
        context = store.key_context(model="org/model", layout=layout, dtype="bfloat16", **fields)
        keys = chunk_keys(TOKENS, context=context, chunk_size=16, save_unfull_chunk=True)
        items = []
        for number, key in enumerate(keys):
            begin, end = 16 * number, min(16 * number + 16, len(TOKENS))
            spec = kv_spec(layout, "bfloat16", tokens=end - begin)
            rotary = dict(context.extra).get("rotary")
            meta = {
                "model": context.model, "revision": context.revision, "namespace": context.namespace,
                "dtype": context.dtype, "tokens": [begin, end], "layers": layout.num_layers,
                "kv_heads": layout.num_kv_heads, "head_dim": layout.head_dim,
                "rope": "applied" if rotary is None else "none", "rotary": rotary,
            }  # fmt: skip
            meta = {name: value for name, value in meta.items() if name not in without}
            items.append(Item(key, spec.split(memoryview(bytearray(spec.raw_bytes))), spec, meta))
        assert all(outcome.ok for outcome in store.submit_put(items).result())
    return context, keys


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (KVLayout(2, 2, 64), {"revision": "r1"}),
        (KVLayout(2, 2, 64), {"namespace": "team-a"}),
        (KVLayout(3, 4, 64, 32), {"revision": "r1"}),
        (KVLayout(2, 1, 576, 0, "mla"), {"revision": "r1"}),
        (KVLayout(2, 2, 64), {"revision": "r1", "extra": (("rope", "pre"), ("rotary", "theta=1"))}),
    ],
)
def test_it_makes_the_keys_of_the_engine(
    layout: KVLayout, fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context, keys = _stored(tmp_path / "kv", layout, **fields)
    url = f"file://{tmp_path / 'kv'}"
    (tmp_path / "tokens").write_text(" ".join(map(str, TOKENS)))
    (tmp_path / "others").write_text(" ".join(map(str, [7, *TOKENS])))
    assert main(["ctl", "context", url, keys[1].hex(), "--tokens", str(tmp_path / "tokens")]) == 0
    said = capsys.readouterr()
    assert "this context makes the record's key" in said.err
    (tmp_path / "context.yaml").write_text(said.out)
    found = context_of(str(tmp_path / "context.yaml"))
    assert found == context
    assert chunk_keys(TOKENS, context=found, chunk_size=16) == keys[:2]
    assert "tp_size, pp_rank" in said.out
    assert main(["ctl", "context", url, keys[1].hex(), "--tokens", str(tmp_path / "others")]) == 1
    assert "does not make the record's key" in capsys.readouterr().err


def test_what_the_record_does_not_say_shows_when_it_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, keys = _stored(tmp_path / "kv", KVLayout(2, 1, 64), revision="r1", tp_rank=0, tp_size=2)
    (tmp_path / "tokens").write_text(" ".join(map(str, TOKENS)))
    words = ["ctl", "context", f"file://{tmp_path / 'kv'}", keys[0].hex()]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "--tokens", str(tmp_path / "tokens")]) == 1
    assert "tp_rank, tp_size" in capsys.readouterr().err


def test_records_that_do_not_say_what_they_are_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, keys = _stored(tmp_path / "kv", KVLayout(2, 2, 64), without=("model", "kv_heads"))
    url = f"file://{tmp_path / 'kv'}"
    assert main(["ctl", "context", url, keys[0].hex()]) == 2
    error = capsys.readouterr().err
    assert "its meta has no model, kv_heads" in error
    assert error.count("\n") == 1
    assert main(["ctl", "context", url, "ab" * 32]) == 1
    assert "there is no record abab" in capsys.readouterr().err
