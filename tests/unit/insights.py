"""CloudWatch Logs Insights, as far as our saved queries use it: `filter`, `stats … by …`, `sort`.
https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/CWL_QuerySyntax.html

Lines that are JSON have their members as fields; `@message` is the line, `@timestamp` its time. A field that is not
there is null: aggregates pass over it, comparisons with it are false. What is not known here is a `ValueError`, so a
query that uses more of the language needs more of this file; so is what the service refuses or what cannot be meant:
a third `stats`, a field behind `stats` that it did not make, a `sort` between two of them, one name for two results.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Row = dict[str, Any]

_TOKEN = re.compile(
    r"\s*(?:(?P<regex>/(?:[^/\\]|\\.)+/)|(?P<number>\d+(?:\.\d+)?)(?P<unit>[smhd]\b)?|(?P<name>@?[A-Za-z_][\w.]*)"
    r"|(?P<op>[<>!]=|[-+*/()=,<>]))"
)
_WORDS = frozenset(
    ("as", "by", "like", "asc", "desc", "ispresent", "bin", "avg", "sum", "count", "max", "min", "pct", "stddev")
)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">": lambda a, b: a > b, "<": lambda a, b: a < b, ">=": lambda a, b: a >= b, "<=": lambda a, b: a <= b,
    "=": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip


def run(query: str, lines: Iterable[str]) -> list[Row]:
    """The rows that a query gives for log lines."""
    rows = [_row(line) for line in lines]
    check(query)
    for command, rest in _stages(query):
        if command == "filter":
            keep = _condition(_Words(rest))
            rows = [row for row in rows if keep(row)]
        elif command == "stats":
            rows = _stats(rest, rows)
        elif command == "sort":
            rows = _sort(rest, rows)
        else:
            raise ValueError(f"command {command!r} is not known")
    return rows


def _stages(text: str) -> list[tuple[str, str]]:
    """(command, what follows it): stages are parted by pipes, wherever they stand but in a regular expression."""
    text = re.sub(r"^#.*$", "", text, flags=re.M)
    stages = re.split(r"\|(?=(?:[^/]*/[^/\n]*/)*[^/]*$)", text)
    found = [stage.strip().partition(" ") for stage in stages if stage.strip()]
    return [(command, rest) for command, _, rest in found]


def check(query: str) -> None:
    """Raises `ValueError` for what the service would refuse, or could not be meant, before there is any line.
    https://docs.aws.amazon.com/AmazonCloudWatch/latest/logs/CWL_QuerySyntax-Stats.html#CWL_QuerySyntax-stats-multi
    """
    made: set[str] | None = None  # the fields that are left behind `stats`
    counted, sorted_at = 0, -1
    for place, (command, rest) in enumerate(_stages(query)):
        words = [word for kind, word in _Words(rest).words if kind == "name"]
        if command == "sort":
            sorted_at = place
        if command == "stats":
            counted += 1
            if counted > 2 or sorted_at >= 0:
                raise ValueError("a third stats, or a sort before the last one")
            names = [words[at + 1] for at, word in enumerate(words) if word == "as"]
            used = [word for at, word in enumerate(words) if word not in _WORDS and (not at or words[at - 1] != "as")]
        else:
            names, used = [], [word for word in words if word not in _WORDS]
        if len(set(names)) < len(names) or set(names) & _WORDS:
            raise ValueError(f"{names}: a name twice, or one that the language has")
        unknown = [name for name in used if made is not None and name not in made]
        if unknown:
            raise ValueError(f"{command} {rest!r}: behind stats there is no {unknown}")
        if command == "stats":
            groups = re.split(r"\bby\b", rest)
            plain = [] if len(groups) < 2 else re.findall(r"(?:^|,)\s*([A-Za-z_@][\w.@]*)\s*(?=,|$)", groups[1])
            made = {*names, *plain}


def _row(line: str) -> Row:
    row: Row = {"@message": line}
    try:
        found = json.loads(line)
    except ValueError:
        return row
    row.update({name: value for name, value in found.items() if not isinstance(value, dict | list)})
    row["@timestamp"] = dt.datetime.fromisoformat(found["time"]).timestamp()
    return row


class _Words:
    """The tokens of a stage."""

    def __init__(self, text: str) -> None:
        self.words: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"cannot read {text[at:]!r}")
            kind = str(found.lastgroup)
            if kind == "unit":
                self.words.append(("span", f"{found['number']}{found['unit']}"))
            else:
                self.words.append((kind, found[kind]))
            at = found.end()

    def peek(self) -> str:
        return self.words[0][1] if self.words else ""

    def take(self, *wanted: str) -> str:
        if not self.words or (wanted and self.words[0][1] not in wanted):
            raise ValueError(f"{' or '.join(wanted) or 'something'} is missing at {self.words[:1]}")
        return self.words.pop(0)[1]

    def may(self, word: str) -> bool:
        if self.peek() == word:
            self.words.pop(0)
            return True
        return False

    def end(self) -> None:
        if self.words:
            raise ValueError(f"{self.words} is left over")


def _condition(words: _Words) -> Callable[[Row], bool]:
    if words.peek() == "ispresent":
        words.take()
        words.take("(")
        name = words.take()
        words.take(")")
        words.end()
        return lambda row: row.get(name) is not None
    name = words.take()
    if words.may("like"):
        if words.words[0][0] != "regex":
            raise ValueError(f"like wants /…/, not {words.peek()!r}")
        pattern = re.compile(words.take()[1:-1])
        words.end()
        return lambda row: isinstance(row.get(name), str) and pattern.search(row[name]) is not None
    compare, value = _COMPARE[words.take(*_COMPARE)], float(words.take())
    words.end()
    return lambda row: row.get(name) is not None and compare(float(row[name]), value)


Value = Callable[[Row], float | None]
Aggregate = Callable[[Sequence[Row]], float | None]


def _sum(words: _Words, factor: Callable[[_Words], Any], combine: Callable[[Any, str, Any], Any]) -> Any:
    left = factor(words)
    while words.peek() in ("+", "-", "*", "/"):
        operator = words.take()
        left = combine(left, operator, factor(words))
    return left


def _calculate(a: float | None, operator: str, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else math.nan}[operator]


def _value(words: _Words) -> Value:
    def one(words: _Words) -> Value:
        name = words.take()
        return lambda row: None if row.get(name) is None else float(row[name])

    def both(a: Value, operator: str, b: Value) -> Value:
        return lambda row: _calculate(a(row), operator, b(row))

    found: Value = _sum(words, one, both)
    return found


def _aggregate(words: _Words) -> Aggregate:
    def one(words: _Words) -> Aggregate:
        if words.words[0][0] == "number":
            number = float(words.take())
            return lambda rows: number
        name = words.take("avg", "sum", "count", "max", "min", "pct", "stddev")
        words.take("(")
        if name == "count" and words.may("*"):
            words.take(")")
            return lambda rows: float(len(rows))
        value = _value(words)
        percent = 0.0
        if name == "pct":
            words.take(",")
            percent = float(words.take())
        words.take(")")

        def aggregate(rows: Sequence[Row]) -> float | None:
            values = sorted(found for row in rows if (found := value(row)) is not None)
            if name == "count":
                return float(len(values))
            if not values:
                return None
            if name == "pct":
                return values[max(0, math.ceil(percent / 100 * len(values)) - 1)]
            if name == "stddev":
                return statistics.pstdev(values)
            return {"avg": statistics.fmean(values), "sum": math.fsum(values), "max": values[-1], "min": values[0]}[
                name
            ]

        return aggregate

    def both(a: Aggregate, operator: str, b: Aggregate) -> Aggregate:
        return lambda rows: _calculate(a(rows), operator, b(rows))

    # Products bind closer than sums; our queries have one of each at most, the product last.
    def term(words: _Words) -> Aggregate:
        left = one(words)
        while words.peek() in ("*", "/"):
            operator = words.take()
            left = both(left, operator, one(words))
        return left

    found: Aggregate = _sum(words, term, both)
    return found


def _stats(text: str, rows: Sequence[Row]) -> list[Row]:
    words = _Words(text)
    results: list[tuple[str, Aggregate]] = []
    groups: list[tuple[str, Callable[[Row], Any]]] = []
    while True:
        aggregate = _aggregate(words)
        words.take("as")
        results.append((words.take(), aggregate))
        if not words.may(","):
            break
    if words.may("by"):
        while True:
            name, of = _group(words)
            if words.may("as"):
                name = words.take()
            groups.append((name, of))
            if not words.may(","):
                break
    words.end()
    parts: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        parts.setdefault(tuple(of(row) for _, of in groups), []).append(row)
    return [
        {**dict(zip([name for name, _ in groups], key, strict=True)), **{name: of(part) for name, of in results}}
        for key, part in parts.items()
    ]


def _group(words: _Words) -> tuple[str, Callable[[Row], Any]]:
    name = words.take()
    if name != "bin":
        return name, lambda row: row.get(name)
    words.take("(")
    span = words.take()
    words.take(")")
    seconds = int(span[:-1]) * _SECONDS[span[-1]]
    return f"bin({span})", lambda row: row["@timestamp"] // seconds * seconds


def _sort(text: str, rows: Sequence[Row]) -> list[Row]:
    words = _Words(text)
    name, order = words.take(), words.take("asc", "desc")
    words.end()
    return sorted(rows, key=lambda row: (row.get(name) is not None, row.get(name)), reverse=order == "desc")
