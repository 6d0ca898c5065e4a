"""Runs in the environment of requirements.txt: one JSON object comes by standard input, one goes to standard output.

{"do": "render", "chart": PATH, "cases": [{"values", "name", "namespace"}], "versions": [...]}
    → [{"documents": [...], "notes": text, "error": text or null, "invalid": [[version, kind, text], ...]}]
{"do": "lint", "chart": PATH}         → messages of Helm's own lint
{"do": "validate", "documents": [...], "versions": [...]} → [[version, kind, text], ...]
{"do": "promql", "queries": [...]}    → [{"selectors": [[name, [label, ...]], ...], "labels": [...], "error"}]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import yaml

_NATIVE = {"v1", "apps/v1", "batch/v1", "policy/v1"}


def render(ask: dict[str, Any]) -> list[dict[str, Any]]:
    import helm_python as helm

    found = []
    for case in ask["cases"]:
        out: dict[str, Any] = {"documents": [], "notes": "", "error": None, "invalid": []}
        try:
            with helm.Chart.load(ask["chart"]) as chart:
                chart.validate_schema(case["values"])
                texts = chart.render(case["values"], name=case["name"], namespace=case["namespace"])
        except helm.HelmError as error:
            out["error"] = str(error)
        else:
            for name in sorted(texts):
                if name.endswith("NOTES.txt"):
                    out["notes"] = texts[name]
                    continue
                out["documents"] += [each for each in yaml.safe_load_all(texts[name]) if each]
            out["invalid"] = validate({"documents": out["documents"], "versions": ask["versions"]})
        found.append(out)
    return found


def lint(ask: dict[str, Any]) -> Any:
    import helm_python as helm

    return helm.lint(ask["chart"])


def validate(ask: dict[str, Any]) -> list[list[str]]:
    import kubernetes_validate

    found = []
    for version in ask["versions"]:
        for document in ask["documents"]:
            if document["apiVersion"] not in _NATIVE:
                continue
            try:
                kubernetes_validate.validate(document, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                found.append([version, document["kind"], f"{'.'.join(map(str, error.path))}: {error.message}"])
    return found


def promql(ask: dict[str, Any]) -> list[dict[str, Any]]:
    import promql_parser as prom

    def look(node: Any, out: dict[str, Any]) -> None:
        if isinstance(node, prom.VectorSelector):
            matchers = [matcher.name for matcher in node.matchers.matchers]
            out["selectors"].append([node.name, matchers])
        if isinstance(node, prom.AggregateExpr) and node.modifier is not None:
            out["labels"] += [*node.modifier.labels]
        for part in ("lhs", "rhs", "expr", "vector_selector", "param"):
            child = getattr(node, part, None)
            if child is not None:
                look(child, out)
        for child in getattr(node, "args", None) or ():
            look(child, out)

    found = []
    for query in ask["queries"]:
        out: dict[str, Any] = {"selectors": [], "labels": [], "error": None}
        try:
            look(prom.parse(query), out)
        except ValueError as error:
            out["error"] = str(error)
        found.append(out)
    return found


if __name__ == "__main__":
    request = json.load(sys.stdin)
    json.dump(
        {"render": render, "lint": lint, "validate": validate, "promql": promql}[request.pop("do")](request), sys.stdout
    )
