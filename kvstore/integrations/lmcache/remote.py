"""LMCache's in-process mode: what its `remote_url` and `remote_storage_plugins` mean.

    remote_storage_plugins: ["kvstore"]
    extra_config:
      remote_storage_plugin.kvstore.module_path: kvstore.integrations.lmcache
      remote_storage_plugin.kvstore.class_name: KVStoreAdapter
      remote_storage_plugin.kvstore.remote_url: s3://bucket/prefix?region=us-west-2

or, with the first three of these lines and without the last, `remote_url: kvstore+s3://bucket/prefix?region=us-west-2`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.backend import Status
from kvstore.completion import Completion
from kvstore.errors import ConfigError, KVStoreError, PermanentError
from kvstore.integrations._opaque import outcomes_of, what_failed
from kvstore.record import Header

from ._client import logger, open_client

__all__ = ["KVStoreAdapter", "KVStoreConnector"]

T = TypeVar("T")

_SCHEME = "kvstore+"
_PLUGIN = "kvstore"
_OPTION = "remote_storage_plugin."
_OWN = ("module_path", "class_name", "remote_url", "config_file")

Names = list[str]  # the class below has a method called `list`

# What a record of LMCache's says about its bytes, in its meta block.
_FORMAT, _SHAPES, _DTYPES = "lmcache_fmt", "lmcache_shapes", "lmcache_dtypes"


class KVStoreAdapter(ConnectorAdapter):  # type: ignore[misc]
    """Finds its settings under `remote_storage_plugin.NAME.…` of LMCache's `extra_config`: `remote_url`,
    `config_file`, and options of `kvstore.config`. NAME is `kvstore`, or `kvstore.INSTANCE` for several."""

    def __init__(self) -> None:
        super().__init__(_SCHEME)

    def can_parse(self, url: str) -> bool:
        """True for `kvstore+SCHEME://…`, and for the plug-ins `kvstore` and `kvstore.INSTANCE`."""
        if url.startswith("plugin://"):
            return bool(extract_plugin_type(url.removeprefix("plugin://")) == _PLUGIN)
        return url.startswith(_SCHEME)

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Open the store.

        Raises:
            IrrecoverableException: the configuration makes no sense. LMCache stops then; of everything else it would
                only write a warning, and go on without a store.
        """
        try:
            return self._create(context)
        except ConfigError as error:
            raise IrrecoverableException(f"kvstore: {error}") from error

    @staticmethod
    def _create(context: ConnectorContext) -> RemoteConnector:
        extra = (context.config.extra_config or {}) if context.config is not None else {}
        name = context.plugin_name or _PLUGIN
        mine = f"{_OPTION}{name}."
        settings = {key[len(mine) :]: value for key, value in extra.items() if key.startswith(mine)}
        if context.plugin_name is None:  # that plug-in's own URL is for the backend of its own
            settings.pop("remote_url", None)
        remote_url: Any = settings.get("remote_url")
        elsewhere = str(getattr(context.config, "remote_url", None) or "")
        if context.plugin_name is None:
            remote_url = context.url  # what `kvstore+` means is the configuration's to say: `kvstore+ucx` is a scheme
        elif remote_url is None and settings.get("config_file") is None and elsewhere.startswith(_SCHEME):
            logger.info("%s: the store is the one of remote_url; the plug-in by its name stays empty", name)
            return _Nothing(context)
        options = {key: value for key, value in settings.items() if key not in _OWN}
        return KVStoreConnector(context, remote_url, settings.get("config_file"), options)


class KVStoreConnector(RemoteConnector):  # type: ignore[misc]
    """A store as LMCache's remote connector.

    Everything that runs on LMCache's event loop only submits and awaits: no socket is read there. Objects are
    allocated without spinning, and given back on every path but the one that hands them over.
    """

    def __init__(
        self,
        context: ConnectorContext,
        remote_url: Any,
        config_file: str | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(context.config, context.metadata)
        options = dict(options or {})
        seconds = getattr(context.config, "blocking_timeout_secs", None)
        if seconds is not None:  # beyond it LMCache does not wait anyway
            options.setdefault("blocking_timeout", float(seconds))
        self._client = open_client("remote", remote_url, config_file, options)
        self._cpu = context.local_cpu_backend
        self._layerwise = bool(context.config.use_layerwise)
        # Objects have the size of a whole chunk, unless they are layers, or were compressed.
        self._known_size = not self._layerwise and context.config.remote_serde in (None, "naive")

    def __repr__(self) -> str:
        return f"KVStoreConnector({self._client.store!r})"

    # What is there.

    async def exists(self, key: Any) -> bool:
        """True if a record of this key is stored."""
        return await self._client.prefix(self._names([key])) == 1

    def exists_sync(self, key: Any) -> bool:
        """The same for LMCache's other threads; ends by `lookup_timeout`."""
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """How many leading keys are stored; ends by `lookup_timeout`."""
        return self._client.prefix(self._names(keys)).result()

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:
        """How many leading keys are stored."""
        return await self._client.prefix(self._names(keys))

    # Reading.

    async def get(self, key: Any) -> Any:
        """The object of a key, verified; None if there is none."""
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        """Yes."""
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """The objects of keys, by index: one that is missing, damaged or does not fit is None, and moves no other."""
        objects: list[Any] = [None] * len(keys)
        try:
            await self._get_all(self._names(keys), objects)
        except BaseException:  # LMCache cancels what takes too long
            for obj in objects:
                if obj is not None:
                    obj.ref_count_down()
            raise
        return objects

    async def _get_all(self, names: Sequence[str], objects: list[Any]) -> None:
        rest = list(range(len(names)))
        if self._known_size:
            for index in rest:
                objects[index] = self._allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
            rest = await self._fill(names, objects, [index for index in rest if objects[index] is not None])
        if rest:  # of another size: the record says which
            heads = await self._heads([names[index] for index in rest])
            for index, head in zip(rest, heads, strict=True):
                objects[index] = None if head is None else self._allocate_for(head)
            await self._fill(names, objects, [index for index in rest if objects[index] is not None])

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:
        """The objects of the leading keys that are there, up to the first that is not."""
        objects = await self.batched_get(keys)
        count = next((index for index, obj in enumerate(objects) if obj is None), len(objects))
        for obj in objects[count:]:
            if obj is not None:
                obj.ref_count_down()
        return objects[:count]

    async def _fill(self, names: Sequence[str], objects: list[Any], indices: Sequence[int]) -> list[int]:
        """Read into the objects at `indices`; those that fail are given back and become None. Returns the indices of
        those that may be there, but do not fit (they have another size)."""
        if not indices:
            return []
        lent = [objects[index] for index in indices]
        try:
            completion = self._client.get([names[index] for index in indices], [obj.byte_array for obj in lent])
        except BaseException:
            for index, obj in zip(indices, lent, strict=True):
                objects[index] = None
                obj.ref_count_down()
            raise
        kept: set[int] = set()
        misfits: list[int] = []
        try:
            await _ended(completion)
            for index, outcome in zip(indices, outcomes_of(completion, len(indices)), strict=True):
                if outcome.status is Status.OK:
                    kept.add(index)
                elif isinstance(outcome.error, PermanentError):
                    misfits.append(index)
        finally:  # LMCache may cancel us
            lost = [index for index in indices if index not in kept]
            given_back = [objects[index] for index in lost]
            for index in lost:
                objects[index] = None
            self._give_back(completion, given_back)
        return misfits

    async def _heads(self, names: Sequence[str]) -> Sequence[Header | None]:
        try:
            return await self._client.store.submit_heads(self._client.keys(names))
        except KVStoreError as error:
            logger.warning("records of LMCache's could not be looked into: %s", error)
            return [None] * len(names)

    def _allocate(self, shapes: Any, dtypes: Any, fmt: Any) -> Any:
        # busy_loop would spin on the event loop that all of LMCache's remote backends share.
        return self._cpu.allocate(shapes, dtypes, fmt, busy_loop=False)

    def _allocate_for(self, head: Header) -> Any:
        """An object as the record describes it; None if it does not describe one of its own size."""
        meta = head.meta()
        try:
            fmt = MemoryFormat(meta[_FORMAT])
            shapes = [torch.Size(shape) for shape in meta[_SHAPES]]
            dtypes = [None if name == "None" else getattr(torch, name) for name in meta[_DTYPES]]
            if not shapes or len(shapes) != len(dtypes) or any(n < 0 for shape in shapes for n in shape):
                raise ValueError("its shapes make no sense")
            claimed = sum(
                int(shape[0]) if dtype is None else math.prod(shape) * dtype.itemsize
                for shape, dtype in zip(shapes, dtypes, strict=True)
            )
            if claimed != head.raw_bytes:
                raise ValueError(f"it describes {claimed} bytes and holds {head.raw_bytes}")
        except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
            logger.warning("record %s… is no object of LMCache's: %r", head.key[:6].hex(), error)
            return None
        obj = self._allocate(shapes, dtypes, fmt)
        if obj is not None and len(memoryview(obj.byte_array).cast("B")) != head.raw_bytes:
            obj.ref_count_down()
            return None
        return obj

    # Writing.

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Store an object, from where it lies. LMCache counts its reference down when this returns.

        Raises:
            KVStoreError: it is not stored.
        """
        meta = {
            _FORMAT: int(memory_obj.get_memory_format().value),
            _SHAPES: [list(shape) for shape in memory_obj.get_shapes()],
            _DTYPES: [str(dtype).removeprefix("torch.") for dtype in memory_obj.get_dtypes()],
        }
        memory_obj.ref_count_up()
        try:
            completion = self._client.put(self._names([key]), [memory_obj.byte_array], [meta])
        except BaseException:
            memory_obj.ref_count_down()
            raise
        try:
            await _ended(completion)
        finally:
            self._give_back(completion, [memory_obj])
        outcomes = outcomes_of(completion, 1)
        if trouble := what_failed(outcomes, stored=True):
            raise outcomes[0].error or KVStoreError(trouble)

    def support_batched_put(self) -> bool:
        """No: LMCache takes a batch that failed for stored; put by put, it counts what failed."""
        return False

    def _give_back(self, completion: Completion[Any], objects: Sequence[Any]) -> None:
        """Count references down once no late I/O can touch the objects. Waits for nothing, and holds no thread of the
        loop's, however many backends hang."""
        if not objects:
            return

        def give_back() -> None:
            for obj in objects:
                obj.ref_count_down()

        self._client.settler.when_settled(completion, give_back)

    # The rest.

    def remove_sync(self, key: Any) -> bool:
        """Remove a record; True if it was there."""
        completion = self._client.delete(self._names([key]))
        try:
            return completion.result()[0].status is Status.OK
        except KVStoreError as error:
            logger.warning("a record could not be removed: %s", error)
            return False

    async def list(self) -> Names:
        """Names of all stored records, in hex: records are stored under hashes, from which LMCache's keys cannot be
        told."""

        def walk() -> Names:
            return [info.key.hex() for page in self._client.store.list() for info in page]

        return await _in_thread(walk)

    def support_ping(self) -> bool:
        """Yes."""
        return True

    async def ping(self) -> int:
        """0 if the store answers, else 1."""
        try:
            (outcome,) = await self._client.exists(["ping"])
        except KVStoreError:
            return 1
        return 1 if outcome.status is Status.ERROR else 0

    async def close(self) -> None:
        """Finish what is being written (within `close_timeout`), and end. May be called twice."""
        await _in_thread(self._client.close)

    def _names(self, keys: Sequence[Any]) -> Names:
        return [key.to_string() for key in keys]


class _Nothing(RemoteConnector):  # type: ignore[misc]
    """Holds nothing: what the plug-in is when `remote_url` names the store."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__(context.config, context.metadata)

    async def exists(self, key: Any) -> bool:
        """Never."""
        return False

    def exists_sync(self, key: Any) -> bool:
        """Never."""
        return False

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """None."""
        return 0

    async def get(self, key: Any) -> None:
        """Nothing."""

    async def put(self, key: Any, memory_obj: Any) -> None:
        """Left to the other one."""

    async def list(self) -> Names:
        """Nothing."""
        return []

    async def close(self) -> None:
        """Nothing to close."""


async def _ended(completion: Completion[Any]) -> None:
    """Await a completion, whatever becomes of it; if we are cancelled it is, too."""
    try:
        await completion
    except KVStoreError:
        pass


async def _in_thread(call: Callable[[], T]) -> T:
    """What `call` returns, run in a thread of its own: the loop's few threads may all be taken by others."""
    done: Completion[T] = Completion()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:  # noqa: BLE001 - told to whoever awaits it
            done.set_exception(error)

    threading.Thread(target=run, name="kvstore-lmcache", daemon=True).start()
    return await done
