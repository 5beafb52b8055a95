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
    """Bare scenes have no words of their own: only mutations that bring them fit."""
    return [
        scene
        for scene in scenes
        if mutation.needs <= scene.has
        and ("bare" in mutation.needs or "bare" not in scene.has)
        and (not mutation.only or scene.command in mutation.only)
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
        raise ValueError(
            f"names are given twice: {sorted({n for n in names if names.count(n) > 1})[:5]}"
        )
    return sorted(found, key=lambda case: case.name)


def _case(mutation: Mutation, scene: Scene, seed: int) -> Case:
    base = dict(scene.bases)[scene.broken.split("/")[0]] if scene.broken else "none"
    return Case(
        f"{mutation.group}/{mutation.name}/{scene.command} of {base}", mutation, scene, seed
    )


def sample(found: Iterable[Case], count: int, seed: int, *, heavy: bool = True) -> list[Case]:
    """`count` cases: classes take turns, and each gives a mutation that was not taken yet with the
    command that has been taken least. Without `heavy` none whose commands load torch."""
    random = Random(f"sample/{seed}")
    used: dict[str, int] = defaultdict(int)
    piles: dict[str, list[Case]] = defaultdict(list)
    for case in found:
        if heavy or not case.scene.heavy:
            piles[case.mutation.group].append(case)
    for pile in piles.values():
        random.shuffle(pile)
    chosen: list[Case] = []
    while len(chosen) < count and any(piles.values()):
        for group in sorted(piles):
            if not piles[group] or len(chosen) == count:
                continue
            case = min(piles[group], key=lambda one: used[one.scene.command])
            used[case.scene.command] += 1
            chosen.append(case)
            taken = case.mutation
            piles[group] = [other for other in piles[group] if other.mutation is not taken]
    return sorted(chosen, key=lambda case: case.name)
