"""A stand-in Terraform provider.

Serves the schema of a real provider to a real Terraform core over plugin protocol 6. Planning marks every unset
computed attribute as unknown; applying fills it with a well-shaped fake (fakes.py). It talks to no cloud. Core finds it
by TF_REATTACH_PROVIDERS, and so installs and downloads nothing for it.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import re
import threading

import grpc
import msgpack
from fakes import ANSWERS, FORMS, digest, fake
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

# ------------------------------------------------------------------------------------------------ the wire
# Only the fields used here: "number type name"; '*' means repeated. A map is a repeated Entry on the wire.
# Numbers are those of Terraform's plugin protocol 6; the message names are ours (they do not travel).
MESSAGES = {
    "Value": "1 bytes msgpack, 2 bytes json",
    "Diag": "1 int64 severity, 2 string summary, 3 string detail",
    "Raw": "1 bytes json",
    "Attr": "1 string name, 2 bytes type, 4 bool required, 5 bool optional, 6 bool computed, 7 bool sensitive,"
    "10 Object nested_type, 11 bool write_only",
    "Object": "1 *Attr attributes, 3 int64 nesting",
    "Nested": "1 string type_name, 2 Block block, 3 int64 nesting, 4 int64 min_items, 5 int64 max_items",
    "Block": "1 int64 version, 2 *Attr attributes, 3 *Nested block_types",
    "Schema": "1 int64 version, 2 Block block",
    "Entry": "1 string key, 2 Schema value",
    "Empty": "",
    "Schemas": "1 Schema provider, 2 *Entry resources, 3 *Entry data_sources, 8 *Entry ephemerals",
    "Diags1": "1 *Diag diagnostics",
    "Diags2": "2 *Diag diagnostics",
    "ProviderConfig": "1 Value config",
    "TypedConfig": "1 string type_name, 2 Value config",
    "Configure": "1 string terraform_version, 2 Value config",
    "UpgradeQ": "1 string type_name, 2 int64 version, 3 Raw raw_state",
    "UpgradeA": "1 Value state, 2 *Diag diagnostics",
    "ReadQ": "1 string type_name, 2 Value state, 3 bytes private",
    "ReadA": "1 Value state, 2 *Diag diagnostics, 3 bytes private",
    "PlanQ": "1 string type_name, 2 Value prior, 3 Value proposed, 4 Value config, 5 bytes prior_private",
    "PlanA": "1 Value planned, 3 bytes private, 4 *Diag diagnostics, 5 bool legacy",
    "ApplyQ": "1 string type_name, 2 Value prior, 3 Value planned, 4 Value config, 5 bytes private",
    "ApplyA": "1 Value state, 2 bytes private, 3 *Diag diagnostics, 4 bool legacy",
    "DataA": "1 Value state, 2 *Diag diagnostics",
    "OpenA": "1 *Diag diagnostics, 3 Value result",
    "StopA": "1 string error",
}
CALLS = {
    "GetProviderSchema": ("Empty", "Schemas"),
    "ValidateProviderConfig": ("ProviderConfig", "Diags2"),
    "ConfigureProvider": ("Configure", "Diags1"),
    "ValidateResourceConfig": ("TypedConfig", "Diags1"),
    "ValidateDataResourceConfig": ("TypedConfig", "Diags1"),
    "ValidateEphemeralResourceConfig": ("TypedConfig", "Diags1"),
    "UpgradeResourceState": ("UpgradeQ", "UpgradeA"),
    "ReadResource": ("ReadQ", "ReadA"),
    "PlanResourceChange": ("PlanQ", "PlanA"),
    "ApplyResourceChange": ("ApplyQ", "ApplyA"),
    "ReadDataSource": ("TypedConfig", "DataA"),
    "OpenEphemeralResource": ("TypedConfig", "OpenA"),
    "CloseEphemeralResource": ("Empty", "Diags1"),
    "GetFunctions": ("Empty", "Diags2"),
    "StopProvider": ("Empty", "StopA"),
}


def _messages():
    kinds = {"string": 9, "bytes": 12, "bool": 8, "int64": 3}
    f = descriptor_pb2.FileDescriptorProto(name="standin.proto", package="standin", syntax="proto3")
    for name, fields in MESSAGES.items():
        m = f.message_type.add(name=name)
        for spec in filter(None, (s.strip() for s in fields.split(","))):
            num, kind, field = spec.split()
            x = m.field.add(name=field, number=int(num), label=3 if kind[0] == "*" else 1)
            kind = kind.lstrip("*")
            if kind in kinds:
                x.type = kinds[kind]
            else:
                x.type, x.type_name = 11, f".standin.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(f)
    return {n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"standin.{n}")) for n in MESSAGES}


M = _messages()
NESTING = {"single": 1, "list": 2, "set": 3, "map": 4, "group": 5}
SECRET = re.compile(r"(password|secret_string|secret_binary|auth_token|private_key|_wo$)")


class _Unknown:
    def __repr__(self):
        return "<unknown>"


UNKNOWN = _Unknown()


def decode(v):
    if v.msgpack:
        return msgpack.unpackb(v.msgpack, raw=False, strict_map_key=False, ext_hook=lambda code, data: UNKNOWN)
    return json.loads(v.json) if v.json else None


def encode(v):
    def pack(o):
        return msgpack.ExtType(0, b"\0") if o is UNKNOWN else o

    return M["Value"](msgpack=msgpack.packb(v, use_bin_type=True, default=pack))


def _attr(name, a):
    settable = not a.get("computed") or a.get("optional", False)
    p = M["Attr"](
        name=name,
        required=a.get("required", False),
        optional=a.get("optional", False),
        computed=a.get("computed", False),
        write_only=is_write_only(name, a),
        sensitive=settable and bool(SECRET.search(name)) and a.get("type") == "string",
    )
    if "nested_type" in a:
        p.nested_type.nesting = NESTING[a["nested_type"]["nesting_mode"]]
        p.nested_type.attributes.extend(_attr(k, v) for k, v in sorted(a["nested_type"]["attributes"].items()))
    else:
        p.type = json.dumps(a["type"]).encode()
    return p


def _block(b):
    out = M["Block"](attributes=[_attr(n, a) for n, a in sorted(b["attributes"].items())])
    for n, x in sorted(b["block_types"].items()):
        out.block_types.append(
            M["Nested"](
                type_name=n,
                block=_block(x["block"]),
                nesting=NESTING[x["nesting_mode"]],
                min_items=x.get("min_items", 0),
                max_items=x.get("max_items", 0),
            )
        )
    return out


def _schema(s):
    return M["Schema"](version=s.get("version", 0), block=_block(s["block"]))


def is_write_only(name, a):
    return name.endswith("_wo") and not a.get("computed")


# ------------------------------------------------------------------------------------------------ state shapes
def cty(a):
    if "type" in a:
        return a["type"]
    o = ["object", {n: cty(x) for n, x in a["nested_type"]["attributes"].items()}]
    return o if a["nested_type"]["nesting_mode"] == "single" else [a["nested_type"]["nesting_mode"], o]


def planned(blk, v, cfg):
    """Proposed state -> planned state: unset computed attributes become unknown."""
    if v is None or v is UNKNOWN:
        return v
    out, cfg = dict(v), cfg if isinstance(cfg, dict) else {}
    for n, a in blk["attributes"].items():
        if a.get("computed") and cfg.get(n) is None and out.get(n) is None:
            out[n] = UNKNOWN
        if is_write_only(n, a):
            out[n] = None
    for n, x in blk["block_types"].items():
        bv, cv = out.get(n), cfg.get(n)
        if isinstance(bv, list):
            out[n] = [
                planned(x["block"], e, cv[i] if isinstance(cv, list) and i < len(cv) else None)
                for i, e in enumerate(bv)
            ]
        elif isinstance(bv, dict):
            out[n] = planned(x["block"], bv, cv)
    return out


def _fill(name, v, ty, rtype, seed, region):
    if v is UNKNOWN:
        return fake(name, ty, rtype, seed, region)
    if isinstance(v, list) and isinstance(ty, list) and ty[0] in ("list", "set"):
        return [_fill(name, e, ty[1], rtype, seed, region) for e in v]
    if isinstance(v, dict) and isinstance(ty, list):
        return {
            k: _fill(k, e, ty[1] if ty[0] == "map" else ty[1].get(k, "dynamic"), rtype, seed, region)
            for k, e in v.items()
        }
    return v


def applied(blk, v, rtype, seed, region):
    """Planned state -> new state: unknowns become fakes."""
    if v is None or v is UNKNOWN:
        return v
    out = dict(v)
    for n, a in blk["attributes"].items():
        out[n] = _fill(n, out.get(n), cty(a), rtype, seed, region)
    for n, x in blk["block_types"].items():
        bv = out.get(n)
        if bv is UNKNOWN:
            out[n] = []
        elif isinstance(bv, list):
            out[n] = [applied(x["block"], e, rtype, f"{seed}.{i}", region) for i, e in enumerate(bv)]
        elif isinstance(bv, dict):
            out[n] = applied(x["block"], bv, rtype, seed, region)
    return out


def upgraded(blk, v):
    """State JSON -> wire: only dynamically typed attributes are written differently."""
    if not isinstance(v, dict):
        return v
    out = dict(v)
    for n, a in blk["attributes"].items():
        if a.get("type") == "dynamic" and isinstance(out.get(n), dict):
            out[n] = [json.dumps(out[n]["type"]).encode(), out[n]["value"]]
    for n, x in blk["block_types"].items():
        out[n] = (
            [upgraded(x["block"], e) for e in out[n]]
            if isinstance(out.get(n), list)
            else upgraded(x["block"], out.get(n))
        )
    return out


# ------------------------------------------------------------------------------------------------ the provider
class Provider:
    """hooks: {'apply': f(type, prior, new, config) -> (new, [error])}; answers: {data source type: {attribute: value}}.

    The real schema has 1,735 resource types, and core reads all that is sent, in every command. `use` says which
    words a module's text has, so that only those types are sent; a type that no schema knows is missing all the same.
    """

    def __init__(self, schema, hooks=None, answers=None):
        self.schema, self.hooks, self.answers = schema, hooks or {}, answers or {}
        self.region, self._serial, self._lock = "us-east-1", itertools.count(), threading.Lock()
        self.reset()
        self.use(None)

    def use(self, words):
        """Send the types among `words` only; None: all."""

        def entries(k):
            kinds = self.schema.get(k, {})
            return [M["Entry"](key=t, value=_schema(x)) for t, x in kinds.items() if words is None or t in words]

        self._made = None
        self._make = lambda: M["Schemas"](
            provider=_schema(self.schema["provider"]),
            resources=entries("resource_schemas"),
            data_sources=entries("data_source_schemas"),
            ephemerals=entries("ephemeral_resource_schemas"),
        )

    def reset(self):
        self.live, self.created, self.deleted = {}, 0, 0

    def GetProviderSchema(self, q):
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made

    def ConfigureProvider(self, q):
        r = (decode(q.config) or {}).get("region")
        if isinstance(r, str):
            self.region = r

    def UpgradeResourceState(self, q):
        return M["UpgradeA"](
            state=encode(upgraded(self.schema["resource_schemas"][q.type_name]["block"], json.loads(q.raw_state.json)))
        )

    def ReadResource(self, q):
        return M["ReadA"](state=q.state, private=q.private)

    def PlanResourceChange(self, q):
        new = decode(q.proposed)
        if new is None:
            return M["PlanA"](planned=q.proposed)
        return M["PlanA"](
            planned=encode(planned(self.schema["resource_schemas"][q.type_name]["block"], new, decode(q.config))),
            legacy=True,
        )

    def ApplyResourceChange(self, q):
        plan, prior, t = decode(q.planned), decode(q.prior), q.type_name
        if plan is None:
            with self._lock:
                self.deleted += 1
                self.live.pop((t, prior.get("id")), None)
            return M["ApplyA"](state=q.planned)
        with self._lock:
            seed = f"{next(self._serial)}"
        region = plan["region"] if isinstance(plan.get("region"), str) else self.region
        new = applied(self.schema["resource_schemas"][t]["block"], plan, t, seed, region)
        if t in FORMS and not prior:
            new.update(FORMS[t](new, region))
        errors = []
        if "apply" in self.hooks:
            new, errors = self.hooks["apply"](t, prior, new, decode(q.config))
        with self._lock:
            self.created += not prior
            self.live[(t, new.get("id"))] = new
        return M["ApplyA"](
            state=encode(new),
            legacy=True,
            diagnostics=[M["Diag"](severity=1, summary="apply failed", detail=e) for e in errors],
        )

    def _answer(self, kind, q):
        blk, cfg, t = self.schema[kind][q.type_name]["block"], decode(q.config), q.type_name
        region = cfg["region"] if isinstance(cfg.get("region"), str) else self.region
        v = applied(blk, planned(blk, cfg, cfg), t, digest(cfg), region)
        more = {**(ANSWERS[t](cfg, region) if t in ANSWERS else {}), **self.answers.get(t, {})}
        return encode({**v, **{k: x for k, x in more.items() if k in blk["attributes"]}})

    def ReadDataSource(self, q):
        return M["DataA"](state=self._answer("data_source_schemas", q))

    def OpenEphemeralResource(self, q):
        return M["OpenA"](result=self._answer("ephemeral_resource_schemas", q))


def serve(provider, folder):
    """Serve; -> (grpc server, entry for TF_REATTACH_PROVIDERS). folder: for the socket, deleted by the caller."""

    def handler(name, q_type, a_type):
        f = getattr(provider, name, None)
        return grpc.unary_unary_rpc_method_handler(
            lambda q, ctx: (f(q) if f else None) or M[a_type](),
            request_deserializer=M[q_type].FromString,
            response_serializer=lambda m: m.SerializeToString(),
        )

    server = grpc.server(
        concurrent.futures.ThreadPoolExecutor(8),
        options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("tfplugin6.Provider", {n: handler(n, *t) for n, t in CALLS.items()}),)
    )
    sock = os.path.join(folder, f"p{id(provider):x}.sock")
    if len(sock) < 100:
        server.add_insecure_port(f"unix://{sock}")
        addr = {"Network": "unix", "String": sock}
    else:  # a unix socket path is limited to about 107 characters
        addr = {"Network": "tcp", "String": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"}
    server.start()
    return server, {"Protocol": "grpc", "ProtocolVersion": 6, "Pid": os.getpid(), "Test": True, "Addr": addr}
