"""The steps that make one model class of another, around one that orders its projections."""

from __future__ import annotations

from qconvert.passes.as_class import AsClass
from qconvert.passes.experts import Unstack
from qconvert.plan.plan import Pass
from qconvert.runtimes.consumers import parse_consumer


def steps_for(step: Pass, consumer: str | None, family: str) -> tuple[Pass, ...]:
    """The step, and those that make the consumer's model class of a source of that family. Raises
    PlanError for an unknown consumer."""
    name = None if consumer is None else parse_consumer(consumer).name
    if name == "qwen3-next" and family == "qwen3_5":
        return Unstack(optional=True), step, AsClass("qwen3_next")
    if name == "qwen3.5" and family == "qwen3_next":
        return step, AsClass("qwen3_5_text")
    return (step,)
