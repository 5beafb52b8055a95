"""Walks over the graph behind outputs: its nodes, each once, and which of their results are used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from qconvert.core.graph import Apply, Output, Value


def nodes(outputs: Iterable[Output]) -> Iterator[Apply]:
    """Every node the outputs depend on, arguments before users, each once."""
    seen: set[int] = set()
    for output in outputs:
        alone = output.node
        if alone is not None and id(alone) in seen:
            continue
        alone = only_node(output)
        if alone is not None:
            if id(alone) not in seen:
                seen.add(id(alone))
                yield alone
            continue
        stack: list[tuple[Apply, bool]] = [
            (piece.origin.node, False)
            for piece in output.pieces
            if isinstance(piece.origin, Value) and id(piece.origin.node) not in seen
        ]
        while stack:
            node, ready = stack.pop()
            if ready:
                yield node
            elif id(node) not in seen:
                seen.add(id(node))
                stack.append((node, True))
                stack.extend(
                    (piece.origin.node, False)
                    for arg in node.args
                    for piece in arg.pieces
                    if isinstance(piece.origin, Value)
                )


def only_node(output: Output) -> Apply | None:
    """The node that an output depends on, if there is but one, which reads sources, and the output is
    in one piece."""
    node = output.node
    if node is None:
        if output.source is not None or len(output.pieces) != 1:
            return None
        origin = output.pieces[0].origin
        node = origin.node if isinstance(origin, Value) else None
    return node if node is not None and node.reads_sources else None


def ports(outputs: Iterable[Output], order: Iterable[Apply]) -> dict[int, frozenset[int]]:
    """By a node's identity, which of its results are used: by outputs, or by the other nodes."""
    args = (arg for node in order for arg in node.args)
    found: dict[int, set[int]] = {}
    for output in itertools.chain(outputs, args):
        for node, port, _, _ in output.results:
            found.setdefault(id(node), set()).add(port)
    return {node: frozenset(ports) for node, ports in found.items()}
