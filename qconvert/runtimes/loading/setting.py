"""Under what a folder is loaded: the rank's place, the GPU and the options of the server."""

from __future__ import annotations

from dataclasses import dataclass

HOPPER = (9, 0)
BLACKWELL = (10, 0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One rank of a server: rank `rank` of `tp` tensor-parallel ones in stage `stage` of `pp`. `ep` is
    the size of expert parallelism; the rest of `tp` divides each expert. By default an H200 without
    options."""

    tp: int = 1
    rank: int = 0
    pp: int = 1
    stage: int = 0
    ep: int = 1
    capability: tuple[int, int] = HOPPER
    moe_runner: str = "auto"
    a2a: str = "none"
    disable_shared_experts_fusion: bool = False
    partition: tuple[int, ...] | None = None

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def ep_rank(self) -> int:
        """The rank's place among groups of experts."""
        return self.rank // self.moe_tp

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.pp - 1

    def layers(self, count: int) -> range:
        """Return which layers of `count` the stage owns (distributed/utils.py, get_pp_indices): without
        a stated partition the last stages own one more each."""
        if self.pp == 1:
            return range(count)  # a stated partition is not looked at
        if self.partition is not None:
            start = sum(self.partition[: self.stage])
            return range(start, start + self.partition[self.stage])
        share, rest = divmod(count, self.pp)
        start = self.stage * share + max(0, self.stage - (self.pp - rest))
        return range(start, start + share + (self.stage >= self.pp - rest))

    def __str__(self) -> str:
        major, minor = self.capability
        gpu = {HOPPER: "H200", BLACKWELL: "B200"}.get(self.capability, "GPU")
        stages = f", pp {self.pp}" if self.pp > 1 else ""
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        options = [
            f"--{name} {value}"
            for name, value, default in (
                ("moe-runner-backend", self.moe_runner, "auto"),
                ("moe-a2a-backend", self.a2a, "none"),
            )
            if value != default
        ]
        if self.disable_shared_experts_fusion:
            options.append("--disable-shared-experts-fusion")
        told = " ".join(options) or "no other options"
        return f"tp {self.tp}{stages}{experts}, {gpu} (capability {major}.{minor}), {told}"


class LoadRefused(Exception):
    """The runtime would end with this error. `kind` is the type of its exception and `says` a part of
    its message; `why` says it in our words, `where` names the module or tensor."""

    def __init__(self, kind: str, says: str, where: str, why: str) -> None:
        super().__init__(f"{where}: {why}")
        self.kind, self.says, self.where, self.why = kind, says, where, why


class NotSimulated(Exception):
    """The simulator has no rule for this class, quantization or setting, so it gives no answer."""
