"""The manual of all options, printed from their definitions: `python -m kvstore.manual > docs/options.md`."""

from __future__ import annotations

import dataclasses
import sys

from . import _lmcache
from .codec import CODEC_NAMES
from .config import OPTIONS
from .options import Option, format_manual
from .registry import scheme_manual
from .tiers.options import tier_manual

__all__ = ["manual"]

_HEAD = """\
# Options

This file is printed by `python -m kvstore.manual > docs/options.md` from the definitions in the code; a test compares
the two.

## Where options come from

Each source overrides the one before it: **defaults < URL < file < environment < keyword**.

| source | how |
|---|---|
| URL | options of that one backend: `file:///mnt/kv?option=value&option=value`, percent-encoded; never a secret |
| file | YAML, named by `open_store(config_file=…)`, `KVSTORE_CONFIG_FILE` or `LMCACHE_CONFIG_FILE` |
| environment | `KVSTORE_<OPTION>`; `LMCACHE_<OPTION>` too, ours win; `KVSTORE_<SCHEME>_<OPTION>` for a backend's |
| keyword | `open_store("file:///mnt/kv", chunk_size=512)` |

`remote_url` is one URL, several separated by commas, or a list; over several the keys are spread. Options of backends
stand in the URL, or in `backend_options` by scheme or by URL; what is given for a URL overrides what the same source
gives for its scheme:

```yaml
remote_url: [file:///mnt/a, file:///mnt/b]
chunk_size: 256
backend_options:
  file: {weight: 1}
  file:///mnt/b: {weight: 2}
```

Sizes are bytes or carry a unit: `4096`, `64KiB`, `1.5GiB` (binary), `10GB` (decimal). Durations are seconds or carry a
unit: `200ms`, `5s`, `2min`, `1h`. An unknown option and an empty, null or ill-typed value are errors that name the
option and its source. Checksums are always verified; there is no option against it.
"""

_TIERS = """\
## Tiers

`tiers` is a list, the fastest first. Each entry is a URL, or a map with `url` and the options below;
[tiers.md](tiers.md) says what they promise. In the environment the list is YAML (JSON) text, or URLs
separated by commas.

```yaml
tiers:
  - url: memory://?bytes=16GiB
    promote: second_use
  - {url: "file:///nvme/kv?bytes=400GiB", write: back}
  - s3://bucket/prefix?region=us-west-2
```

"""

_LMCACHE = """\
## LMCache's names

An LMCache configuration file (in-process mode) and `LMCACHE_*` variables are read as they are. What means the same is
used, with LMCache's units. What has no meaning here is noted (`Config.notes`, and one line in the log) if its absence
changes speed only, and refused if it changes what is stored, found or computed. LMCache's own defaults are passed over.
"""


def _printable(option: Option) -> Option:
    """With the choices that a codec has, and without an empty default."""
    if option.kind == "codec":
        return dataclasses.replace(option, kind="choice", choices=CODEC_NAMES)
    return option if option.default not in ((), {}) else dataclasses.replace(option, default=None)


def manual() -> str:
    """The manual as Markdown. Imports the backends of this distribution."""
    return (
        "\n\n".join(
            part.strip()
            for part in (
                _HEAD,
                "## The store\n\n" + format_manual([_printable(option) for option in OPTIONS]),
                _TIERS + tier_manual(),
                "## Backends\n\n" + scheme_manual(),
                _LMCACHE,
                _lmcache.manual(),
            )
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.stdout.write(manual())
