"""Mutations times scenes: the cases of a seed, all of them or a bounded sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from random import Random

from hostile.breaking import MODULES
from hostile.case import Case, Mutation, Scene
from hostile.scenes import SCENES


def mutations() -> tuple[Mutation, ...]:
    return tuple(mutation for module in MODULES for mutation in module.MUTATIONS)


def fitting(mutation: Mutation, scenes: Sequence[Scene]) -> list[Scene]:
    return [
        scene
        for scene in scenes
        if mutation.needs <= scene.has and (not mutation.only or scene.command in mutation.only)
    ]


def cases(seed: int) -> list[Case]:
    """Each mutation in some of the scenes that it fits, those that have had fewest cases first; the
    order of mutations and scenes is drawn from the seed."""
    random = Random(f"scenes/{seed}")
    order = list(mutations())
    random.shuffle(order)
    used: dict[Scene, int] = defaultdict(int)
    found: list[Case] = []
    for mutation in order:
        scenes = fitting(mutation, SCENES)
        if not scenes:
            raise ValueError(f"no scene for {mutation.group}/{mutation.name}")
        random.shuffle(scenes)
        scenes.sort(key=lambda scene: used[scene])
        for scene in scenes[: mutation.most]:
            used[scene] += 1
            found.append(_case(mutation, scene, seed))
    names = [case.name for case in found]
    if len(set(names)) != len(names):
        raise ValueError(f"names are given twice: {sorted({n for n in names if names.count(n) > 1})[:5]}")
    return sorted(found, key=lambda case: case.name)


def _case(mutation: Mutation, scene: Scene, seed: int) -> Case:
    base = dict(scene.bases)[scene.broken.split("/")[0]] if scene.broken else "none"
    return Case(f"{mutation.group}/{mutation.name}/{scene.command} of {base}", mutation, scene, seed)


def sample(found: Iterable[Case], count: int, seed: int) -> list[Case]:
    """`count` cases spread over groups and commands: in turn from each pair of them."""
    random = Random(f"sample/{seed}")
    piles: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for case in found:
        piles[case.mutation.group, case.scene.command].append(case)
    keys = sorted(piles)
    random.shuffle(keys)
    for pile in piles.values():
        random.shuffle(pile)
    chosen: list[Case] = []
    while len(chosen) < count and any(piles.values()):
        for key in keys:
            if piles[key] and len(chosen) < count:
                chosen.append(piles[key].pop())
    return sorted(chosen, key=lambda case: case.name)
