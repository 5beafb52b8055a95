"""Sizes of a recorded class: sums, products and quotients over the keys of a config, in the grammar of
Python's expressions (`num_attention_heads * head_dim`, `vision_config.hidden_size`, `sizes[layer]`,
`len(indexes)`)."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import add, floordiv, mul, sub
from types import MappingProxyType
from typing import Any

from qconvert.runtimes.loading.setting import NotSimulated

_LAYER = "layer"
_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.FloorDiv: floordiv,
}  # fmt: skip
_MOST = 1 << 31
# The number of a layer may be counted from the last one.
_FROM_THE_END = "_feature_layer"


class Sizes:
    """Values of a config's keys, and of those that it does not state by the defaults of its class.
    `also`: other names of keys, either of which a config may have; `instead`: expressions for one that
    a config does not state, of which the first that it states counts. Raises NotSimulated for a key
    without a value and for a value that is no size."""

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        also: Mapping[str, str] = MappingProxyType({}),
        instead: Mapping[str, Sequence[str | int]] = MappingProxyType({}),
    ) -> None:
        self._values, self._defaults, self._instead = values, defaults, instead
        self._also = {**also, **{other: key for key, other in also.items()}}

    def of(self, expression: str | int, layer: int | None = None) -> int:
        """The value of an expression, in a numbered layer where it names a list."""
        if isinstance(expression, int):
            return expression
        if not expression:
            raise NotSimulated("a size of its class follows from no key of config.json")
        found = self._computed(parsed(expression), layer)
        if not 0 <= found <= _MOST:
            raise NotSimulated(f"{expression} is {found} in config.json, which is no size")
        return found

    def flag(self, key: str) -> object:
        """The value of a key that is no size, None for one that nothing states."""
        value = self._stated(key)
        if value is None and key in self._also:
            value = self._stated(self._also[key])
        return self._defaults.get(key) if value is None else value

    def states(self, key: str) -> bool:
        """Tell whether the config itself states a key, if only that it is null."""
        return any(self._at(one) is not _ABSENT for one in (key, self._also.get(key, key)))

    def _at(self, key: str) -> Any:
        value: Any = self._values
        for part in key.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        return value

    def _stated(self, key: str) -> Any:
        found = self._at(key)
        return None if found is _ABSENT else found

    def has(self, key: str, value: object) -> bool:
        """Tell whether a key has a value ("set": any). Raises NotSimulated where nothing states it."""
        found = self.flag(key)
        if value == "set":
            return found is not None
        if found is None and value is not None and key not in self._defaults:
            raise NotSimulated(
                f"config.json does not state {key}, on which it depends what is built"
            )
        return found == value

    def _computed(self, node: ast.expr, layer: int | None) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp):
            left, right = self._computed(node.left, layer), self._computed(node.right, layer)
            if isinstance(node.op, ast.FloorDiv) and not right:
                raise NotSimulated(f"config.json states 0 for {ast.unparse(node.right)}")
            return _OPERATIONS[type(node.op)](left, right)
        if isinstance(node, ast.Subscript):
            values = self.flag(ast.unparse(node.value))
            if not isinstance(values, list) or layer is None or layer >= len(values):
                raise NotSimulated(f"config.json states no {ast.unparse(node.value)} of each layer")
            return _number(ast.unparse(node), values[layer])
        if isinstance(node, ast.Call):
            key = ast.unparse(node.args[0])
            values = self.flag(key)
            if values is None and (text := ast.unparse(node)) in self._instead:
                return self._other(text, key)
            if not isinstance(values, list):
                raise NotSimulated(f"config.json states no {key}, whose length it is")
            return len(values)
        return self._key(ast.unparse(node))

    def _key(self, key: str) -> int:
        value = self.flag(key)
        if value is None and key in self._instead:
            return self._other(key, key)
        outer, _, last = key.rpartition(".")
        # What both runtimes compute where nothing is stated.
        if value is None and last == "head_dim":
            at = f"{outer}." if outer else ""
            return self.of(f"{at}hidden_size // {at}num_attention_heads")
        if value is None and last == "num_key_value_heads":
            return self._key(f"{outer}.num_attention_heads" if outer else "num_attention_heads")
        return _number(key, value)

    def _other(self, text: str, key: str) -> int:
        """The value of what counts in place of a size that a config leaves out."""
        if self.states(key):
            raise NotSimulated(
                f"config.json states null for {key}, with which no class was recorded"
            )
        for one in self._instead[text]:
            names = [node for node in ast.walk(parsed(str(one))) if isinstance(node, ast.Call)]
            if all(self.flag(ast.unparse(node.args[0])) is not None for node in names):
                return self.of(one)
        raise NotSimulated(f"config.json states no {key}, nor what its class takes for it")


_ABSENT = object()


def _number(key: str, value: object) -> int:
    least = -_MOST if key.endswith(_FROM_THE_END) else 1
    if type(value) is not int or not least <= value <= _MOST:
        raise NotSimulated(f"config.json states no {key} that a model has")
    return value


@lru_cache(maxsize=1024)
def parsed(expression: str) -> ast.expr:
    """The tree of an expression. Raises ValueError for one that is no size."""
    try:
        tree = ast.parse(expression, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no expression of sizes: {error.msg}") from None
    _check(tree, expression)
    return tree


def _check(node: ast.expr, whole: str) -> None:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        _check(node.left, whole)
        _check(node.right, whole)
    elif isinstance(node, ast.Subscript):
        if ast.unparse(node.slice) != _LAYER:
            raise ValueError(f"{whole!r}: a list is asked for its number of the layer alone")
        _check(node.value, whole)
    elif isinstance(node, ast.Attribute):
        _check(node.value, whole)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "len" and len(node.args) == 1:
        _check(node.args[0], whole)
    elif not isinstance(node, ast.Name) and type(getattr(node, "value", None)) is not int:
        raise ValueError(
            f"{whole!r}: expected keys of a config, whole numbers, and + - * // of them"
        )
