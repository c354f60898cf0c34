"""Random JSON schemas: nested objects, arrays, strings with patterns, bounds, references."""

from __future__ import annotations

import random
from typing import Any

NAMES = ["name", "age", "tags", "größe", "a b", 'x"y', "id", "nested"]
PATTERNS = ["^[a-z]{2,5}$", "^\\d{4}-\\d{2}$", "^(cat|dog)s?$", "^[A-F0-9]+$"]
VALUES = ["red", 'gr"een', "blé", 1, 2.5, None, True, {"a": 1}, [1, 2]]
LEAVES = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "lengths"]


def random_schema(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    if rng.random() < 0.1:
        following = {"anyOf": [{"$ref": "#"}, {"type": "null"}]}
        return {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "next": following},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    defined = {f"d{i}": _schema(rng, 2, ()) for i in range(rng.randint(0, 2))}
    schema = _schema(rng, 0, tuple(defined))
    return {**schema, "$defs": defined} if defined else schema


def _schema(rng: random.Random, depth: int, defined: tuple[str, ...]) -> dict[str, Any]:
    kinds = list(LEAVES)
    if depth < 3:
        kinds += ["object"] * 4 + ["array"] * 3 + ["anyOf"] * 2 + ["ref"] * bool(defined)
    kind = rng.choice(kinds)
    if kind in ("integer", "number"):
        return _bounded(rng, kind)
    if kind == "enum":
        return {"enum": rng.sample(VALUES, rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["x", 3, False, None, {"k": ["v"]}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == "lengths":
        least = rng.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}
    if kind == "array":
        return _array(rng, depth, defined)
    if kind == "anyOf":
        return {"anyOf": [_schema(rng, depth + 1, defined) for _ in range(rng.randint(2, 3))]}
    if kind == "ref":
        return {"$ref": f"#/$defs/{rng.choice(defined)}"}
    if kind == "object":
        return _object(rng, depth, defined)
    return {"type": kind}


def _bounded(rng: random.Random, kind: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": kind}
    if rng.random() < 0.6:
        low = rng.randint(-50, 50) if kind == "integer" else rng.randint(-20, 20) / 4
        schema["minimum" if rng.random() < 0.7 else "exclusiveMinimum"] = low
        if rng.random() < 0.7:
            high = low + rng.randint(2, 300)
            schema["maximum" if rng.random() < 0.7 else "exclusiveMaximum"] = high
    return schema


def _array(rng: random.Random, depth: int, defined: tuple[str, ...]) -> dict[str, Any]:
    if rng.random() < 0.15:
        items = [_schema(rng, depth + 1, defined) for _ in range(2)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
    schema: dict[str, Any] = {"type": "array", "items": _schema(rng, depth + 1, defined)}
    if rng.random() < 0.5:
        schema["minItems"] = rng.randint(0, 2)
    if rng.random() < 0.6:
        schema["maxItems"] = schema.get("minItems", 0) + rng.randint(0, 3)
    return schema


def _object(rng: random.Random, depth: int, defined: tuple[str, ...]) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth + 1, defined) for name in names},
    }
    if names:
        schema["required"] = rng.sample(names, rng.randint(0, len(names)))
    chance = rng.random()
    if chance < 0.6:
        schema["additionalProperties"] = False
    elif chance < 0.75:
        schema["additionalProperties"] = _schema(rng, 3, ())
    return schema
