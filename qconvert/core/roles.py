"""Kinds of modules: what a module does in a model, whatever its family calls it.

Every role of a family (`family.Role`) has one kind. Conversions decide by it, never by a name: what may
be quantized, which matrices runtimes fuse, and which side tensor parallelism cuts. A module of
kind UNKNOWN is never quantized.

What runtimes do was read in sglang and vLLM (`layers/linear.py`, `layers/moe/`, and their
classes of the families in `layouts/`).
"""

from __future__ import annotations

from enum import Enum, auto

# Keys of configs that count routed experts, the usual ones first.
EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
# Beside one, in the config of a model that has few of its experts (advise/options.py): their number.
ALL_EXPERTS = "qconvert_all_experts"


class Kind(Enum):
    """Kind of a module. Matrices are [outputs, inputs], unless stated otherwise."""

    # Enum's own hashes the name, in Python: kinds of 140,000 tensors are looked up a few times each.
    __hash__ = object.__hash__

    UNKNOWN = auto()  # not described by a family

    EMBEDDING = auto()  # tokens to hidden states, [vocabulary, hidden]
    POSITION = auto()  # positions to hidden states
    HEAD = auto()  # hidden states to logits, [vocabulary, hidden]
    NORM = auto()  # scales of a normalization, and its shifts
    BUFFER = auto()  # small parameters, not matrices: A_log, dt_bias, inv_freq, a router's bias
    CONV = auto()  # a convolution, patch embeddings of vision towers among them

    # Attention, grouped-query or with all heads.
    QUERY = auto()
    KEY = auto()
    VALUE = auto()
    OUTPUT = auto()
    QKV = auto()  # the three in one matrix, one after another
    # Multi-head latent attention: into the low ranks, and out of them.
    QUERY_DOWN = auto()  # q_a_proj
    QUERY_UP = auto()  # q_b_proj
    KV_DOWN = auto()  # kv_a_proj_with_mqa
    KV_UP = auto()  # kv_b_proj
    OUTPUT_DOWN = auto()  # wo_a: heads of each group to a low rank, before the output
    # DeepSeek's sparse attention: the choice of tokens.
    INDEXER = auto()  # its projections
    INDEXER_QUERY = auto()  # DeepSeek-V4's wq_b, in FP8 as its attention
    INDEXER_WEIGHTS = auto()  # one number a head

    # Linear attention (Gated DeltaNet): inputs fused or split, and its output.
    GDN_QKVZ = auto()
    GDN_QKV = auto()
    GDN_Z = auto()
    GDN_BA = auto()
    GDN_B = auto()
    GDN_A = auto()
    GDN_OUTPUT = auto()

    # A dense layer's MLP.
    GATE = auto()
    UP = auto()
    DOWN = auto()
    GATE_UP = auto()  # both in one matrix, the gate first
    # The experts that every token passes through, and their gate, [1, hidden].
    SHARED_GATE = auto()
    SHARED_UP = auto()
    SHARED_DOWN = auto()
    SHARED_WEIGHT = auto()
    # The choice of experts, [experts, hidden].
    ROUTER = auto()
    # Routed experts, a module each.
    EXPERT_GATE = auto()
    EXPERT_UP = auto()
    EXPERT_DOWN = auto()
    # All experts of a layer in one parameter with three dimensions.
    STACKED_GATE_UP = auto()
    STACKED_GATE = auto()
    STACKED_UP = auto()
    STACKED_DOWN = auto()
    EXPERT_UNKNOWN = auto()  # part of routed experts, not described

    LINEAR = auto()  # a linear layer of another purpose
    # One that a runtime's class builds by its quantization config, as into and out of a convolution.
    MIXER_IN = auto()
    MIXER_OUT = auto()
    DRAFT_JOIN = auto()  # of draft (MTP) layers: two hidden states to one, [hidden, 2 hidden]
    VISION = auto()  # a matrix of a vision tower or of its projector

    @property
    def quantizable(self) -> bool:
        """Return whether runtimes build it as a linear layer, or as experts, and load it quantized."""
        return self in _QUANTIZABLE

    @property
    def linear(self) -> bool:
        """Return whether runtimes build it as a linear layer or as experts, so that they look up in the
        quantization config how it is stored. Not all of them load quantized."""
        return self in _LINEAR

    @property
    def routed(self) -> bool:
        """Return whether it belongs to routed experts."""
        return self in _ROUTED

    @property
    def stacked(self) -> bool:
        """Return whether it holds all routed experts of a layer."""
        return self in _STACKED

    @property
    def never_quantized(self) -> bool:
        """Return whether none of the runtimes here loads it quantized: codes would be read as
        numbers."""
        return self in _NEVER_QUANTIZED

    @property
    def cut(self) -> Cut:
        """Return which part of it each rank of tensor parallelism gets."""
        if self in _BY_COLUMNS:
            return Cut.COLUMNS
        return Cut.ROWS if self in _BY_ROWS else Cut.WHOLE


class Cut(Enum):
    """Cut of a matrix [outputs, inputs] by tensor parallelism: each rank has some rows, some columns, or
    all of it."""

    ROWS = auto()
    COLUMNS = auto()
    WHOLE = auto()


_APART = (Kind.EXPERT_GATE, Kind.EXPERT_UP, Kind.EXPERT_DOWN)
# The matrices of shared experts.
SHARED = (Kind.SHARED_GATE, Kind.SHARED_UP, Kind.SHARED_DOWN)
_STACKED = (Kind.STACKED_GATE_UP, Kind.STACKED_GATE, Kind.STACKED_UP, Kind.STACKED_DOWN)
_ROUTED = frozenset((*_APART, *_STACKED, Kind.EXPERT_UNKNOWN))
_BY_COLUMNS = frozenset(
    (
        Kind.OUTPUT, Kind.GDN_OUTPUT, Kind.DOWN, Kind.SHARED_DOWN, Kind.EXPERT_DOWN,
        Kind.STACKED_DOWN, Kind.MIXER_OUT,
    )
)  # fmt: skip
_BY_ROWS = frozenset(
    (
        Kind.EMBEDDING, Kind.HEAD, Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.QKV,
        Kind.GATE_UP, Kind.QUERY_UP, Kind.KV_UP, Kind.OUTPUT_DOWN,
        Kind.GDN_QKVZ, Kind.GDN_QKV, Kind.GDN_Z, Kind.GDN_BA, Kind.GDN_B, Kind.GDN_A, Kind.GATE,
        Kind.UP, Kind.SHARED_GATE, Kind.SHARED_UP, Kind.EXPERT_GATE, Kind.EXPERT_UP,
        Kind.STACKED_GATE_UP, Kind.STACKED_GATE, Kind.STACKED_UP, Kind.MIXER_IN,
    )
)  # fmt: skip
_QUANTIZABLE = frozenset(
    (
        Kind.QUERY, Kind.KEY, Kind.VALUE, Kind.QKV, Kind.GATE_UP, Kind.OUTPUT,
        Kind.QUERY_UP, Kind.GDN_QKVZ, Kind.GDN_QKV,
        Kind.GDN_Z, Kind.GDN_OUTPUT, Kind.GATE, Kind.UP, Kind.DOWN, Kind.SHARED_GATE, Kind.SHARED_UP,
        Kind.SHARED_DOWN, Kind.MIXER_IN, Kind.MIXER_OUT, *_APART, *_STACKED,
    )
)  # fmt: skip
# Read in the dtype they have, or too small for a kernel: gates of linear attention have one row a head,
# that of a shared expert is one row; kv_b_proj is split after loading, and q_a_proj is fused with
# kv_a_proj_with_mqa before it.
_LINEAR = _QUANTIZABLE | {
    Kind.QUERY_DOWN, Kind.KV_DOWN, Kind.KV_UP, Kind.OUTPUT_DOWN, Kind.GDN_BA, Kind.GDN_B, Kind.GDN_A,
    Kind.INDEXER, Kind.INDEXER_QUERY, Kind.VISION, Kind.LINEAR,
}  # fmt: skip
_NEVER_QUANTIZED = frozenset(
    (
        Kind.EMBEDDING, Kind.POSITION, Kind.HEAD, Kind.NORM, Kind.BUFFER, Kind.CONV, Kind.ROUTER,
        Kind.SHARED_WEIGHT,
    )
)  # fmt: skip

# Matrices that runtimes compute as one, so with one scheme and, in NVFP4, one global scale.
_JOINED = (
    (Kind.QUERY, Kind.KEY, Kind.VALUE),
    (Kind.QUERY_DOWN, Kind.KV_DOWN),
    (Kind.GATE, Kind.UP),
    (Kind.SHARED_GATE, Kind.SHARED_UP),
    (Kind.EXPERT_GATE, Kind.EXPERT_UP),
    (Kind.GDN_QKV, Kind.GDN_Z),
    (Kind.GDN_B, Kind.GDN_A),
)


def joined_with(kind: Kind) -> tuple[Kind, ...]:
    """The kinds that runtimes compute as one matrix with this one, including itself."""
    return next((kinds for kinds in _JOINED if kind in kinds), (kind,))
