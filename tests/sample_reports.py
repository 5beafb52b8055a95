"""Reports to be shown: sound ones, large ones, and texts that try to break a format."""

from __future__ import annotations

import random
from math import inf, nan
from typing import Any

from qconvert.validation.findings import Finding, Measure, Rule, Table
from qconvert.validation.runner import Report

# Quotes, ends of CDATA, scripts, tables and lines, colours of a terminal, half a character.
NASTY = (
    "a\"b'c]]></script><img src=x onerror=alert(1)>|d`e\\f\n::error::g\r%h"
    "\x00\x1b[31mi\u202e\ud800é漢😀"
)


RULES = {
    "QC900": Rule("QC900", "a title & <b>", "A cause | with a pipe.", "Do <this>, then `that`."),
    "QC901": Rule("QC901", "another", "Its cause.", "Its fix."),
}


def measure(layer: int | None, expert: int | None, role: str, rms: float, **more: Any) -> Measure:
    inside = f"mlp.experts.{expert}.{role}" if expert is not None else f"self_attn.{role}"
    known = {
        "tensor": f"model.layers.{layer}.{inside}.weight" if layer is not None else f"{role}.weight",
        "role": role, "layer": layer, "expert": expert, "format": "w4a16", "weights": 4096,
        "rms": rms, "worst": 3 * rms, "cosine": 1 - rms * rms / 2,
    }  # fmt: skip
    return Measure(**{**known, **more})


def awkward() -> Report:
    """Texts that no report may choke on, and figures that no number stands for."""
    return Report(
        about={"folder": NASTY, "level": "full"},
        findings=[
            Finding("QC901", "warning", f"weights {NASTY}", f"warned {NASTY}"),
            Finding("QC900", "error", f"tensor {NASTY}", f"said {NASTY}"),
            Finding("QC999", "error", "config.json: quantization_config", "no module documents it"),
        ],
        proved=[f"proved {NASTY}"],
        read=[f"read {NASTY}"],
        not_checked=[f"claim (a (b) c) {NASTY} (give --against SRC (or not))"],
        measures=[
            measure(0, 0, NASTY, 0.0, cosine=1.0),
            measure(0, 1, NASTY, inf, cosine=nan, tensor=NASTY),
            measure(1, None, "q_proj", 0.01),
            measure(None, None, "lm_head", 0.02),
        ],
        tables=[Table(f"table {NASTY}", ("what", NASTY), ((NASTY, "1.5"), ("x", "-2")), NASTY)],
    )


def sound() -> Report:
    return Report(
        about={"folder": "out", "level": "headers"},
        proved=["headers, index and file sizes agree"],
        not_checked=["every byte is as written (give --level full)"],
    )


def large(layers: int = 61, experts: int = 256) -> Report:
    """As of a DeepSeek-V3: three dense layers, then experts with noise, a bad layer, a bad expert,
    dead ones and equal ones."""
    rng = random.Random(7)
    measures = []
    for layer in range(layers):
        for role, level in (
            ("q_a_proj", 31.0),
            ("q_b_proj", 33.5),
            ("kv_a_proj", 30.0),
            ("o_proj", 34),
        ):
            sqnr = level + rng.gauss(0, 0.8) + 2 * layer / layers
            measures.append(measure(layer, None, role, 10 ** (-sqnr / 20), format="fp8"))
        for role, level in (("gate_proj", 21.5), ("up_proj", 21.9), ("down_proj", 20.4)):
            for expert in range(experts):
                sqnr = level + rng.gauss(0, 0.35) + 0.03 * layer - 3 * (layer == layers // 2)
                sqnr -= 9 * ((layer, expert, role) == (layers // 3, experts // 2, "down_proj"))
                rms = 0.0 if expert == 3 and layer < 9 else 10 ** (-sqnr / 20)
                dead = (layer, expert) == (layers - 2, experts - 20)
                more: dict[str, Any] = {"cosine": nan} if dead else {}
                measures.append(measure(layer, expert, role, inf if dead else rms, **more))
    return Report(
        about={
            "folder": "DeepSeek-V3-w4a16", "against": "DeepSeek-V3",
            "model": "deepseek_v3, 61 layers, 256 experts", "format": "w4a16", "level": "full",
        },
        findings=[
            Finding("QC900", "error", measures[-1].tensor, "SQNR is 9.2 dB, expected 18.0 or more"),
            *(Finding("QC901", "warning", f"tensor {i}", "is all zero") for i in range(30)),
        ],
        proved=["headers, index and file sizes agree", "every byte is as it was written"],
        read=["linear attention is fused in 1 group, says qconvert.json"],
        not_checked=["Triton kernels against torch (give --kernels)"],
        measures=measures,
        tables=[Table("where the error comes from", ("layer", "share"), (("0", "12%"), ("1", "8%")))],
    )  # fmt: skip
