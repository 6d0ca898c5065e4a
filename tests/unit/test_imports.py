"""Who may import whom, and what `import kvstore` costs: imports point at the core only, and are made when needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import kvstore

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kvstore": ROOT / "kvstore",
    "kvstore_backends": ROOT / "backends" / "kvstore_backends",
    "kvstore_transport": ROOT / "transport" / "kvstore_transport",
    "kvstore_bench": ROOT / "tools" / "kvstore_bench",
    "kvstore_cli": ROOT / "tools" / "kvstore_cli",
}
# Package → siblings that it may import. Tools may import everything.
MAY_IMPORT = {
    "kvstore": set[str](),
    "kvstore_backends": {"kvstore", "kvstore_transport"},
    "kvstore_transport": set[str](),
    "kvstore_bench": {"kvstore", "kvstore_backends", "kvstore_transport"},
    "kvstore_cli": {"kvstore", "kvstore_backends", "kvstore_transport", "kvstore_bench"},
}
TENSOR_LIBRARIES = {"torch", "transformers", "accelerate", "vllm", "sglang"}
# Where tensors are; elsewhere in the core one may look for a loaded torch in `sys.modules`, but not import it.
WITH_TENSORS = {"codec", "blend", "prefetch", "integrations"}
# Where it may be imported inside functions only, by those who ask for a model.
ON_DEMAND = {"kvstore.testing", "kvstore_bench", "kvstore_bench.peers"}


class Import(NamedTuple):
    """One import statement (or call of `import_module` with a literal), wherever it stands."""

    module: str
    line: int
    top_level: bool


def imports_of(source: str, package: str) -> Iterator[Import]:
    """All imports of a module's source. `package`: what relative imports are relative to ("kvstore.codec")."""
    tree = ast.parse(source)
    inside = {id(child) for node in ast.walk(tree) if isinstance(node, _SCOPES) for child in ast.walk(node)}
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, top)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield Import(".".join([*base, *([node.module] if node.module else [])]), node.lineno, top)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__", "find_spec") and isinstance(name, str) and name[:1] != ".":
                yield Import(name, node.lineno, top)


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def sibling_trouble(package: str, source: str, where: str, within: str) -> list[str]:
    """Imports of a sibling that `package` must not know."""
    forbidden = {name for name in PACKAGES if name != package} - MAY_IMPORT[package]
    return [
        f"{where}:{found.line} imports {found.module}"
        for found in imports_of(source, within)
        if found.module.split(".")[0] in forbidden
    ]


def tensor_trouble(package: str, source: str, where: str, within: str) -> list[str]:
    """Imports of torch and what stands on it where it must not be."""
    parts = within.split(".")
    if package == "kvstore" and len(parts) > 1 and parts[1] in WITH_TENSORS:
        return []
    return [
        f"{where}:{found.line} imports {found.module}"
        for found in imports_of(source, within)
        if found.module.split(".")[0] in TENSOR_LIBRARIES and (found.top_level or within not in ON_DEMAND)
    ]


def modules_of(package: str) -> list[tuple[str, str, str]]:
    """(source, path for messages, package of the module) of each module."""
    folder = PACKAGES[package]
    found = []
    for path in sorted(folder.rglob("*.py")):
        within = ".".join([package, *path.relative_to(folder).parts[:-1]])
        found.append((path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)), within))
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_at_the_core_only(package: str) -> None:
    modules = modules_of(package)
    assert modules, "the package was found"
    assert [trouble for module in modules for trouble in sibling_trouble(package, *module)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_torch_is_imported_only_where_tensors_are(package: str) -> None:
    assert [trouble for module in modules_of(package) for trouble in tensor_trouble(package, *module)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import kvstore_backends",
        "import kvstore_backends.file as f",
        "from kvstore_backends.file import FileBackend",
        "def f():\n    from kvstore_transport import tcp",
        "if TYPE_CHECKING:\n    import kvstore_bench",
        "import importlib\nimportlib.import_module('kvstore_backends.file')",
        "__import__('kvstore_cli')",
    ],
)
def test_the_check_finds_imports_however_they_are_written(source: str) -> None:
    assert sibling_trouble("kvstore", source, "x.py", "kvstore")


@pytest.mark.parametrize(
    "source",
    ["from . import keys", "from .keys import Key", "from ..keys import Key", "import kvstore.keys", "import os"],
)
def test_the_check_accepts_what_is_allowed(source: str) -> None:
    assert not sibling_trouble("kvstore", source, "x.py", "kvstore.codec")
    assert not sibling_trouble("kvstore_backends", "import kvstore, kvstore_transport", "x.py", "kvstore_backends")
    assert sibling_trouble("kvstore_transport", "import kvstore.errors", "x.py", "kvstore_transport")


def test_the_check_knows_where_tensors_may_be() -> None:
    assert tensor_trouble("kvstore", "import torch", "x.py", "kvstore")
    assert tensor_trouble("kvstore", "def f():\n    import torch.nn", "x.py", "kvstore")
    assert tensor_trouble("kvstore", "import torch.nn", "x.py", "kvstore.testing")
    assert not tensor_trouble("kvstore", "def f():\n    import torch.nn", "x.py", "kvstore.testing")
    assert not tensor_trouble("kvstore", "import torch", "x.py", "kvstore.integrations")
    assert tensor_trouble("kvstore_bench", "import torch", "x.py", "kvstore_bench")
    assert not tensor_trouble("kvstore_bench", "def f():\n    import torch", "x.py", "kvstore_bench")


def loaded_after(code: str) -> set[str]:
    """The modules that an interpreter of its own has loaded after `code`, less those it starts with."""
    show = "import sys; print(*sorted(sys.modules))"
    run = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=True, cwd="/")
        for text in (f"{code}\n{show}", show)
    ]
    return set(run[0].stdout.splitlines()[-1].split()) - set(run[1].stdout.splitlines()[-1].split())


def test_importing_kvstore_imports_next_to_nothing() -> None:
    loaded = loaded_after("import kvstore")
    assert {name for name in loaded if name.startswith("kvstore")} == {"kvstore", "kvstore._version"}
    foreign = {name.split(".")[0] for name in loaded} - {"kvstore", "typing", "importlib", "__future__"}
    foreign -= set(sys.stdlib_module_names)
    assert foreign == set(), "no library"
    assert not loaded & {"asyncio", "ssl", "logging", "dataclasses", "inspect", "socket", "concurrent.futures"}


@pytest.mark.parametrize(
    "module",
    [
        "kvstore.config",
        "kvstore.registry",
        "kvstore.store",
        "kvstore.testing",
        "kvstore.integrations",
        "kvstore_backends",
        "kvstore_transport",
        "kvstore_bench",
    ],
)
def test_no_module_of_ours_imports_torch_or_numpy_by_itself(module: str) -> None:
    loaded = {name.split(".")[0] for name in loaded_after(f"import {module}")}
    assert module.partition(".")[0] in loaded
    assert not loaded & {*TENSOR_LIBRARIES, "numpy"}


def test_reading_a_configuration_imports_neither_numpy_nor_a_backend() -> None:
    loaded = loaded_after("import kvstore; kvstore.load_config('file:///x', env={'KVSTORE_CHUNK_SIZE': '512'})")
    assert "kvstore.config" in loaded
    assert not {name.split(".")[0] for name in loaded} & {
        *TENSOR_LIBRARIES,
        "numpy",
        "kvstore_backends",
        "yaml",
        "asyncio",
    }


# What `kvstore` exports.


def test_every_exported_name_resolves() -> None:
    for name in kvstore.__all__:
        assert getattr(kvstore, name) is not None
        assert name in dir(kvstore)
    assert sorted(kvstore.__all__) == sorted(set(kvstore.__all__))


def test_exports_are_the_same_for_type_checkers() -> None:
    tree = ast.parse((ROOT / "kvstore" / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert typed == kvstore._HOME
    assert {*typed, "__version__"} == set(kvstore.__all__)


def test_all_errors_are_exported() -> None:
    from kvstore import errors

    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert classes <= set(kvstore.__all__)


def test_submodules_are_attributes() -> None:
    names = ("keys.chunk_keys", "integrations", "errors")
    run = f"import kvstore; print({', '.join(f'kvstore.{name}.__name__' for name in names)})"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60, check=True, cwd="/")
    assert done.stdout.split() == ["chunk_keys", "kvstore.integrations", "kvstore.errors"]
    for name in kvstore._SUBMODULES:
        assert name in dir(kvstore)
        assert (ROOT / "kvstore" / name).is_dir() or (ROOT / "kvstore" / f"{name}.py").is_file()


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'kvstore' has no attribute 'nonsense'"):
        _ = kvstore.nonsense
    assert not hasattr(kvstore, "torch")
