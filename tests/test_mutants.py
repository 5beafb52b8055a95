"""Each wrong line of what makes outputs is found by `validate --level full --against`, although it holds
while validators run: none of them judges with the code that passes convert with.

A mutant whose output is not found would be published as "proved". A new decoder, encoder or order gets
its mutants here.
"""

from __future__ import annotations

from pathlib import Path

import golden
import pytest
from mutants import CASES, Bench, Mutant, applied, changed, differ, found_wrong
from sampled import sampled
from test_mutants_calibrated import MUTANTS as CALIBRATED_MUTANTS

MUTANTS = (
    # --- which matrix is which
    Mutant(
        "gate and up exchanged", "amx int4", "models.experts", "_read",
        "place.expert, _PROJECTION[role], draft",
        'place.expert, {"gate_proj": "up_proj", "up_proj": "gate_proj"}.get('
        "k := _PROJECTION[role], k), draft",
    ),
    Mutant(
        "experts exchanged", "amx int4", "models.experts", "_read",
        "yield Projection(layer, place.expert, ", "yield Projection(layer, place.expert ^ 1, ",
    ),
    Mutant(
        "layers exchanged", "amx int8", "models.experts", "_read",
        "layer = place.layer\n", "layer = place.layer if draft else place.layer ^ 1\n",
    ),
    Mutant(
        "gate and up of stacks exchanged", "amx of stacks", "models.experts", "_read",
        "for n, part in enumerate(_STACKED[role]):",
        "for n, part in enumerate(_STACKED[role][::-1]):",
    ),
    Mutant(
        "gate and up of stacks exchanged, packed", "w4a16 of stacks", "models.experts", "_read",
        "for n, part in enumerate(_STACKED[role]):",
        "for n, part in enumerate(_STACKED[role][::-1]):",
    ),
    Mutant(
        "scales of a KV cache below 0", "cache", "passes.kv_scale", "KvScale.__call__",
        'pack("<f", self.value)', 'pack("<f", -self.value)',
    ),
    Mutant(
        "no scale of keys", "cache", "passes.kv_scale", "KvScale.__call__",
        "for end in _ENDS}", "for end in _ENDS[1:]}",
    ),
    Mutant(
        "stacks from the last expert on", "amx of stacks", "formats.registry", "read_of_stack",
        "plan.tensors[name].index(expert)",
        "plan.tensors[name].index(plan.tensors[name].type.shape[0] - 1 - expert)",
    ),
    Mutant(
        "columns of turned stacks cut from the first on", "amx of turned stacks",
        "ops.base", "Columnwise.cut", "first=self.first + start", "first=self.first",
    ),
    Mutant(
        "columns of turned stacks one on", "amx of turned stacks", "ops.transpose", "Columns.run",
        "source = source[:, self.first : self.first + self.count]",
        "source = np.roll(source, 1, axis=1)[:, self.first : self.first + self.count]",
    ),
    Mutant(
        "stack: up before gate", "stack", "passes.experts", "Stack.__call__",
        "(_STACKED[0], (gate, up))", "(_STACKED[0], (up, gate))",
    ),
    Mutant(
        "stack: experts from the last on", "stack fp8", "passes.experts", "_stacked",
        "range(role_index.dims.num_experts)", "reversed(range(role_index.dims.num_experts))",
    ),
    Mutant(
        "unstack: up called gate", "unstack", "passes.experts", "_halves",
        "yield Kind.EXPERT_GATE, matrix.rows(0, rows // 2)\n    yield Kind.EXPERT_UP",
        "yield Kind.EXPERT_UP, matrix.rows(0, rows // 2)\n    yield Kind.EXPERT_GATE",
    ),
    # --- adapters
    Mutant(
        "columns of A from the last on", "merge", "ops.merge", "Factor.run",
        "part = values[at : at + stop - start]",
        "part = values[at : at + stop - start, :: -1 if self.rows < self.columns else 1]",
    ),
    Mutant(
        "alpha not divided by the rank", "merge", "models.adapters", "_scaling",
        "else alpha / rank", "else alpha",
    ),
    Mutant(
        "alpha of another module", "merge", "models.adapters", "_scaling",
        'config.get("alpha_pattern")', "{}",
    ),
    Mutant(
        "the scale left out", "merge", "models.adapters", "_low_rank",
        "names, factor * scale,", "names, factor,",
    ),
    Mutant(
        "DoRA without its magnitude", "merge dora", "ops.merge", "Merge.floats",
        "wanted / norm", "1 / norm",
    ),
    Mutant(
        "DoRA with the norm of one row for all", "merge dora", "ops.merge", "Merge.floats",
        ".sum(axis=1, keepdims=True)", ".sum(axis=1, keepdims=True)[:1]",
    ),
    Mutant(
        "rsLoRA divided by the rank", "merge dora", "models.adapters", "_scaling",
        "alpha / sqrt(rank)", "alpha / rank",
    ),
    Mutant(
        "A of another expert", "merge experts", "passes.merge", "_term",
        "right.rows(expert * rank, (expert + 1) * rank)",
        "right.rows((expert ^ 1) * rank, ((expert ^ 1) + 1) * rank)",
    ),
    Mutant(
        "B of another expert of a stack", "merge stacks", "passes.merge", "_term",
        "first, step = expert,", "first, step = expert ^ 1,",
    ),
    Mutant(
        "gate and up of an adapter exchanged", "merge experts", "models.adapters",
        "Targets._by_role", "for kind in kinds:", "for kind in kinds[::-1]:",
    ),
    Mutant(
        "an adapter added twice", "merge fp8", "ops.merge", "Merge.floats",
        "values = values + product(left[start:stop], right)",
        "values = values + 2 * product(left[start:stop], right)",
    ),
    # --- experts that stay
    Mutant(
        "experts exchanged, pruned", "prune", "passes.prune", "_moved",
        "enumerate(kept)", "enumerate(kept[::-1])",
    ),
    Mutant(
        "rows of the experts that go", "prune", "passes.prune", "_of_router",
        "if chooses and shape[:1] == (experts,):\n        return _rows(output, numbers)",
        "if chooses and shape[:1] == (experts,):\n        return output.rows(0, len(numbers))",
    ),
    Mutant(
        "a correction term of all experts", "prune", "passes.prune", "_of_router",
        'or "share" in below', 'or "share" in below or "correction" in below',
    ),
    Mutant(
        "the config's count as it was", "prune", "passes.prune", "Prune.__call__",
        "config=_config(plan, experts, rename)", "config=plan.config",
    ),
    Mutant(
        "stacks: experts from the last on", "prune stacks", "passes.prune", "_of_stack",
        "return _rows(output, numbers)", "return _rows(output, numbers[::-1])",
    ),
    # --- scales of others
    Mutant(
        "scales of another expert", "amx of fp8", "formats.fp8.format", "read",
        "plan.tensors[scale], fp8_scheme_of",
        "plan.tensors[scale.replace('rts.0', 'rts.9').replace('rts.1', 'rts.0')"
        ".replace('rts.9', 'rts.1')], fp8_scheme_of",
    ),
    Mutant(
        "scales of another layer, dequantized", "dequant", "passes.dequant", "Dequant.__call__",
        "_dequantized(name, scales[name], plan)",
        "_dequantized(name, scales[name].translate({48: 49, 49: 48}) "
        "if '.0.linear_attn.out_proj' in name or '.1.linear_attn.out_proj' in name "
        "else scales[name], plan)",
    ),
    Mutant(
        "scales of another group", "w4a16", "formats.int_packed.packers", "PackQuantized.pack",
        "_put(codes.scale, scale)", "_put(np.roll(codes.scale, 1), scale)",
    ),
    Mutant(
        "scales of another NUMA node", "amx int4", "passes.amx", "ExpertsToAmx.named",
        "results[2 * shard + 1]", "results[2 * (self.numa - 1 - shard) + 1]",
    ),
    # --- tiles cut again
    Mutant(
        "rows of another NUMA node", "recut to four", "passes.recut", "RecutTiles._cut",
        "_part(codes, number, self.numa)", "_part(codes, self.numa - 1 - number, self.numa)",
    ),
    Mutant(
        "scales of rows of another NUMA node", "recut to four", "passes.recut", "RecutTiles._cut",
        "_part(scale, number, self.numa)", "_part(scale, self.numa - 1 - number, self.numa)",
    ),
    Mutant(
        "columns of another NUMA node", "recut to four", "formats.amx.recut", "_runs",
        "divmod(first + at, old)", "divmod((first + at) ^ 1, old)",
    ),
    Mutant(
        "the scale of one NUMA node", "recut int4 to one", "formats.amx.recut", "Recut.run",
        "np.maximum.reduce([scales[shard] for shard in spanned])", "scales[spanned[0]]",
    ),
    Mutant(
        "codes that keep their old scale", "recut int8 to one", "formats.amx.recut", "Recut.run",
        "if len(spanned) == 1:", "if True:",
    ),
    Mutant(
        "ratios of other rows", "recut int8 to one", "formats.amx.recut", "Recut._round",
        "ratio.reshape(", "ratio[::-1].reshape(",
    ),
    Mutant(
        "codes rounded down", "recut int4 to one", "formats.amx.recut", "Recut._round",
        "np.rint(values, out=values)", "np.floor(values, out=values)",
    ),
    Mutant(
        "halves of bytes exchanged again", "recut int4 to one", "formats.amx.recut", "Recut._round",
        "np.right_shift(spare, 4, out=spare)", "np.right_shift(found, 4, out=spare)",
    ),
    Mutant(
        "K blocks one after another by rows", "recut wide", "formats.amx.recut", "Recut._cells",
        "blocks[:, tiles * begin : tiles * (begin + wide)]",
        "blocks.reshape(len(blocks), tiles, steps, -1)[:, :, begin : begin + wide]",
    ),
    Mutant(
        "the NUMA count of before", "recut to four", "passes.recut", "RecutTiles.__call__",
        '"numa": self.numa,', '"numa": found.numa,',
    ),
    # --- files of ranks
    Mutant(
        "ranks from the last on", "join ranks", "passes.join_ranks", "_whole",
        "parts[rank] for rank in range(ranks)]", "parts[rank] for rank in range(ranks)[::-1]]",
    ),
    Mutant(
        "columns of ranks from the last on", "join ranks", "ops.gather", "SideBySide.gather",
        "result[:, number]", "result[:, -1 - number]",
    ),
    Mutant(
        "columns of ranks one below another", "join ranks", "passes.join_ranks", "_whole",
        "(rows_in_turn,) = apply(Gather(SideBySide(ranks)), *ordered)",
        "rows_in_turn = concat(ordered)",
    ),
    Mutant(
        "experts stated to be in parts", "join ranks", "passes.join_ranks", "JoinRanks.__call__",
        "PRESHARDED: False", "PRESHARDED: True",
    ),
    # --- FP8
    Mutant(
        "E4M3's bias off by one", "dequant", "formats.fp8.decode", "_BIAS", "2.0**120", "2.0**119",
    ),
    Mutant(
        "FP8 rounded towards zero", "dequant", "formats.fp8.decode", "DequantFp8.run",
        "np.add(tile_bits, 0x8000, out=tile_bits)", "np.add(tile_bits, 0, out=tile_bits)",
    ),
    Mutant(
        "block scales' rows and columns exchanged", "dequant", "formats.fp8.decode", "DequantFp8.run",
        "_spread(factors[first]", "_spread(factors.T[first] if factors.shape[0] == factors.shape[1] "
        "else factors[first]",
    ),
    Mutant(
        "scales divide", "amx of fp8", "formats.fp8.decode", "DequantFp8.run",
        "np.multiply(values, spread, out=values)", "np.divide(values, spread, out=values)",
    ),
    Mutant(
        "exponents' bias off by one", "dequant exponents", "formats.fp8.decode", "_decode_scale",
        "np.left_shift(bits, 23, out=bits)", "np.left_shift(bits + 1, 23, out=bits)",
    ),
    Mutant(
        "bf16's ties away from zero", "dequant bf16 scales", "ops.cast", "round_to_bf16",
        "0x7FFF", "0x8000",
    ),
    Mutant(
        "E5M2 read as E4M3", "amx of channels", "formats.fp8.decode", "_decode",
        'if dtype == "F8_E5M2":', 'if dtype == "":',
    ),
    Mutant(
        "scales of other rows", "amx of channels", "formats.fp8.decode", "_scale_rows",
        "scale[:, number : number + 1]", "scale[::-1, number : number + 1]",
    ),
    Mutant(
        "scales of another expert of a stack", "amx of fp8 stacks", "formats.registry",
        "read_of_stack", "scale = scale.index(expert)",
        "scale = scale.index(scale.type.shape[0] - 1 - expert)",
    ),
    Mutant(
        "a cut inside a block of scales", "amx of fp8", "formats.fp8.decode", "_regrid",
        "scale.rows(row // block[0], row // block[0] + 1)",
        "scale.rows(min(-(-row // block[0]), scale.type.shape[0] - 1), "
        "min(-(-row // block[0]), scale.type.shape[0] - 1) + 1)",
    ),
    Mutant(
        "float16's bias off by one", "amx of float16", "ops.cast", "_decode_f16",
        "np.float32(2.0**112)", "np.float32(2.0**111)",
    ),
    # --- packed integers, read
    Mutant(
        "nibbles exchanged, read", "amx of int4", "ops.ints", "spread_nibbles",
        "np.copyto(out, source)", "np.copyto(out, source >> 4 | source << 4)",
    ),
    Mutant(
        "codes read less 7", "amx of int4", "formats.int_packed.decode", "Products._multiply",
        "np.subtract(codes, np.uint8(1 << (self._bits - 1)), out=codes)",
        "np.subtract(codes, np.uint8((1 << (self._bits - 1)) - 1), out=codes)",
    ),
    Mutant(
        "a bit of every other code lost, asymmetric", "amx of asymmetric", "ops.ints",
        "spread_nibbles", "0x0F0F", "0x0F07",
    ),
    Mutant(
        "zero points of other rows", "amx of asymmetric", "formats.int_packed.decode",
        "DequantInts._products",
        "unpacked(at.T, self.bits, rows).T", "unpacked(at.T, self.bits, rows).T[::-1]",
    ),
    Mutant(
        "zero points added", "amx of asymmetric", "formats.int_packed.decode", "Products._multiply",
        "np.subtract(grouped, zeros.reshape(-1, 1), out=grouped)",
        "np.add(grouped, zeros.reshape(-1, 1), out=grouped)",
    ),
    Mutant(
        "int8 codes signed", "amx of int8", "formats.int_packed.decode", "Products._multiply",
        "np.subtract(codes, np.uint8(1 << (self._bits - 1)), out=codes)", "pass",
    ),
    Mutant(
        "GPTQ's zero points as they are stored", "amx of gptq", "formats.int_packed.gptq",
        "DequantGptq._zeros",
        "return mine + np.uint16(1)", "return mine",
    ),
    Mutant(
        "GPTQ's groups side by side", "amx of gptq", "formats.int_packed.gptq", "DequantGptq._products",
        "None if side_by_side else column_group", "None",
    ),
    # --- AMX
    Mutant(
        "NUMA nodes exchanged, rows", "amx int4", "passes.amx", "ExpertsToAmx.shards",
        "range(0, stored.rows, height)", "reversed(range(0, stored.rows, height))",
    ),
    Mutant(
        "NUMA nodes exchanged, columns", "amx int8", "formats.amx.encode", "Amx.run",
        "for shard, target in enumerate(weights):",
        "for shard, target in enumerate(weights[::-1]):",
    ),
    Mutant(
        "halves of AMX bytes exchanged", "amx int4", "formats.amx.tiles", "pair_up",
        "np.bitwise_or(eight[:, :, 0], paired[:, :, 1]",
        "np.bitwise_or(eight[:, :, 1], paired[:, :, 0]",
    ),
    Mutant(
        "AMX codes' sign", "amx int4", "formats.amx.tiles", "pair_up",
        "0x8888888888888888", "0x7777777777777777",
    ),
    Mutant(
        "halves of tiles exchanged", "amx int8", "formats.amx.tiles", "place",
        ".reshape(-1, 2, 16, steps, 16)", ".reshape(-1, 2, 16, steps, 16)[:, ::-1]",
    ),
    Mutant(
        "rows and words of tiles exchanged", "amx int8", "formats.amx.tiles", "place",
        "transpose(0, 3, 1, 4, 2)", "transpose(0, 3, 1, 2, 4)",
    ),
    Mutant(
        "columns in one block", "amx wide", "formats.amx.tiles", "K_BLOCK", "3584", "7168",
    ),
    Mutant(
        "AMX int4 a sixteenth up", "amx int4", "formats.amx.encode", "Amx._quantize",
        "(128 if", "(130 if",
    ),
    Mutant(
        "AMX int8 a code up", "amx int8", "formats.amx.encode", "Amx._quantize",
        '(128 if self.method == "int4" else 0)', '(128 if self.method == "int4" else 1)',
    ),
    Mutant(
        "AMX scales of 128", "amx int8", "formats.amx.encode", "_ONE_127TH", "0x3C010204", "0x3C000000",
    ),
    Mutant(
        "AMX scales in steps", "amx search", "formats.amx.encode", "Amx._quantize",
        "np.float32(1 / 16)", "np.float32(1)",
    ),
    Mutant(
        "AMX codes towards zero", "amx search", "formats.amx.encode", "Amx._quantize",
        "np.clip(cut, -limit, limit, out=cut)", "np.trunc(np.clip(cut, -limit, limit), out=cut)",
    ),
    Mutant(
        "AMX sizes exchanged in the manifest", "amx int4", "passes.amx", "ExpertsToAmx.with_shards",
        '"hidden_size": dims.hidden_size', '"hidden_size": dims.moe_intermediate_size',
    ),
    Mutant(
        "AMX method in the manifest", "amx int4", "passes.amx", "ExpertsToAmx.with_shards",
        '"method": RUNTIME_NAME[self.method]', '"method": "AMXINT8"',
    ),
    Mutant(
        "draft layer left out of the manifest", "amx int4", "passes.amx",
        "ExpertsToAmx.with_shards",
        "{p.layer for p in self.kept(experts)}", "{p.layer for p in self.kept(experts) if not p.draft}",
    ),
    # --- packed integers, written
    Mutant(
        "nibbles exchanged, written", "w4a16", "formats.int_packed.packers", "along_rows",
        "np.bitwise_or(pairs, pairs >> np.uint16(4), out=pairs)",
        "np.bitwise_or(pairs << np.uint16(4), pairs >> np.uint16(8), out=pairs)",
    ),
    Mutant(
        "a code up", "w4a16 of fp8", "formats.int_packed.encode", "_round_plain",
        "np.float32(_ROUNDER)", "np.float32(_ROUNDER + 1)",
    ),
    Mutant(
        "codes towards zero", "w8a16", "formats.int_packed.encode", "_round_plain",
        "np.minimum(values, spare, out=values)", "np.trunc(np.minimum(values, spare), out=values)",
    ),
    Mutant(
        "scales of half as many steps", "w4a16", "formats.int_packed.encode", "_round_plain",
        "np.float32(half - 0.5)", "np.float32(half / 2 - 0.5)",
    ),
    Mutant(
        "the last scale that was tried", "w4a16 searched", "formats.int_packed.search", "_best_scales",
        "better = usable & (error < best)", "better = usable",
    ),
    Mutant(
        "searched codes one up", "w4a16 searched", "formats.int_packed.search", "_nearest",
        "np.add(codes, np.float32(_ROUNDER), out=codes)",
        "np.add(codes, np.float32(_ROUNDER + 1), out=codes)",
    ),
    Mutant(
        "searched codes without their scale's sign", "w4a16 searched", "formats.int_packed.search",
        "_best_scales", "_nearest(values, scale, middle,", "_nearest(values, np.abs(scale), middle,",
    ),
    Mutant(
        "searched codes of half their range", "w4a16 searched", "formats.int_packed.search", "_nearest",
        "np.float32(scheme.low) - zero", "np.float32(scheme.low + 4) - zero",
    ),
    Mutant(
        "searched codes without their zero points", "asymmetric searched", "formats.int_packed.search",
        "_best_scales", "np.add(spare, middle[:, None], out=spare)", "np.add(spare, 0, out=spare)",
    ),
    Mutant(
        "words from the highest bits on", "gptq", "formats.int_packed.packers", "along_rows",
        "np.bitwise_or(pairs, pairs >> np.uint16(4), out=pairs)",
        "np.bitwise_or(pairs << 4, pairs >> np.uint16(8), out=pairs)",
    ),
    Mutant(
        "zero points of the other version", "gptq", "formats.int_packed.packers", "PackGptq.pack",
        "1 if self.version == 1 else 0", "0 if self.version == 1 else 1",
    ),
    Mutant(
        "zero points one off", "asymmetric", "formats.int_packed.packers", "_zero_words",
        "fields[:, :rows] = zero.T", "fields[:, :rows] = np.clip(zero.T + 1, lowest, -lowest - 1)",
    ),
    Mutant(
        "zero points along the other axis", "asymmetric", "formats.int_packed.packers",
        "_zero_words", "fields[:, :rows] = zero.T", "fields[:, :rows] = zero.T[:, ::-1]",
    ),
    Mutant(
        "scales along the other axis", "gptq v2", "formats.int_packed.packers", "PackGptq.pack",
        "_put(codes.scale.T, scales)", "_put(codes.scale.reshape(scales.type.shape), scales)",
    ),
    Mutant(
        "groups from the last on", "gptq v2", "formats.int_packed.packers", "_put_g_idx",
        "np.arange(columns)", "np.arange(columns)[::-1]",
    ),
    Mutant(
        "asymmetric codes held to half the range", "gptq v2", "formats.int_packed.search",
        "round_any", "np.clip(values, low, high, out=values)", "np.clip(values, 0, high, out=values)",
    ),
    Mutant(
        "shape exchanged", "w4a16", "passes.w4a16", "ExpertsToW4A16.named",
        "constant_i64((stored.rows, stored.columns))", "constant_i64((stored.columns, stored.rows))",
    ),
    # --- config blocks
    Mutant(
        "group_size of another", "w4a16", "formats.int_packed.format", "group_config",
        '"group_size": scheme.group', '"group_size": 2 * scheme.group',
    ),
    Mutant(
        "strategy of another", "w4a16", "formats.int_packed.format", "group_config",
        '"channel" if scheme.group is None else "group"', '"channel"',
    ),
    Mutant(
        "asymmetric called symmetric", "asymmetric", "formats.int_packed.format", "group_config",
        '"symmetric": scheme.symmetric', '"symmetric": True',
    ),
    Mutant(
        "symmetric called asymmetric", "w4a16", "formats.int_packed.format", "group_config",
        '"symmetric": scheme.symmetric', '"symmetric": False',
    ),
    Mutant(
        "bits of another", "w8a16", "formats.int_packed.format", "group_config",
        '"num_bits": scheme.bits', '"num_bits": 4',
    ),
    Mutant(
        "targets of another", "w4a16", "passes.quantize", "compressed_block",
        'rf"re:{but}.*{escape(path)}.*" for', '"re:.*self_attn.*" for',
    ),
    Mutant(
        "version 2 called the first", "gptq v2", "formats.int_packed.format", "gptq_config",
        '"gptq" if version == 1 else "gptq_v2"', '"gptq"',
    ),
    Mutant(
        "version 1 called the second", "gptq", "formats.int_packed.format", "gptq_config",
        '"gptq" if version == 1 else "gptq_v2"', '"gptq_v2"',
    ),
    Mutant(
        "GPTQ's patterns of modules that stay", "gptq", "formats.int_packed.format", "gptq_config",
        'f"-:{pattern}": {} for pattern in dynamic', 'f"-:{pattern}": {} for pattern in ()',
    ),
    Mutant(
        "no o_proj in the ignore list", "w4a16 of linears", "models.unquantized", "ignored",
        "found.append(split_parameter(name)[0])",
        'found.append(split_parameter(name)[0].replace("o_proj", "x_proj"))',
    ),
    Mutant(
        "packed experts in the ignore list", "w4a16", "models.unquantized", "ignored",
        "found, kept = [], list[str]()", "found, kept = [], list(plan.tensors)",
    ),
    Mutant(
        "scales of the linears beside packed experts under FP8's name", "w4a16 of fp8",
        "passes.quantize", "Quantizing.with_results",
        "others = with_weight_scales(others)", "pass",
    ),
    Mutant(
        "blocks of the linears beside packed experts", "w4a16 of fp8",
        "formats.fp8.format", "fp8_group_config",
        '"block_structure": list(block)', '"block_structure": [2 * block[0], block[1]]',
    ),
    Mutant(
        "routers packed", "w4a16 of linears", "models.linears", "quantizable",
        "not kind.quantizable", 'not (kind.quantizable or kind.name == "ROUTER")',
    ),
    # --- FP8
    Mutant(
        "E4M3 rounded down", "fp8", "formats.fp8.encode", "_codes",
        "((1 << (_DROPPED - 1)) - 1)", "0",
    ),
    Mutant(
        "E4M3 below 2^-6 cut", "fp8 rows", "formats.fp8.encode", "_codes",
        "np.rint(", "np.floor(",
    ),
    Mutant(
        "exponents rounded after codes", "fp8", "formats.fp8.encode", "EncodeFp8.run",
        "np.copyto(into, scale)", "np.copyto(into, scale * 2)",
    ),
    Mutant(
        "FP8 scales of another block", "fp8", "formats.fp8.encode", "EncodeFp8.run",
        "np.copyto(into, scale)", "np.copyto(into, np.roll(scale, 1))",
    ),
    Mutant(
        "FP8 scales too small", "fp8 rows", "formats.fp8.encode", "LARGEST", "448.0", "512.0",
    ),
    Mutant(
        "FP8 without a sign", "fp8", "formats.fp8.encode", "_codes",
        "upper >> 8 & 0x80", "upper >> 8 & 0",
    ),
    Mutant(
        "FP8's list without what stays", "fp8", "passes.fp8", "ToFp8.config",
        "left = with_fused_names(with_draft_names(plan, ignored_linears(plan, others)))",
        "left = ['lm_head']",
    ),
    Mutant(
        "FP8 scales of one of several matrices", "fp8 matrices", "formats.fp8.encode",
        "TensorScale.run", "np.array([max(each)], np.int32)", "np.array([min(each) - 384], np.int32)",
    ),
    Mutant(
        "FP8 of matrices with half the scale", "fp8 matrices packed", "formats.fp8.encode", "_number",
        "<< 16).view(np.float32)", "<< 16).view(np.float32) * np.float32(0.5)",
    ),
    Mutant(
        "FP8 of matrices called channels", "fp8 matrices packed", "formats.fp8.format",
        "fp8_tensor_group_config", '"strategy": "tensor"', '"strategy": "channel"',
    ),
    Mutant(
        "FP8 of channels called matrices", "fp8 rows", "formats.fp8.format", "fp8_group_config",
        '"strategy": "channel"', '"strategy": "tensor"',
    ),
    # --- MXFP4, MXFP8 and INT8 a row
    Mutant(
        "MX scales half as large", "mxfp4", "formats.mx.encode", "_LARGEST_POWER",
        '"mxfp4": 2', '"mxfp4": 3',
    ),
    Mutant(
        "MX scales twice as large", "mxfp4", "formats.mx.encode", "_LARGEST_POWER",
        '"mxfp4": 2', '"mxfp4": 1',
    ),
    Mutant(
        "MX scales too small for E4M3", "mxfp8", "formats.mx.encode", "_LARGEST_POWER",
        '"mxfp8": 8', '"mxfp8": 10',
    ),
    Mutant(
        "MX exponents of another group", "mxfp4", "formats.mx.encode", "EncodeMx._groups",
        "np.copyto(exponents[:, None], powers,", "np.copyto(exponents[:, None], np.roll(powers, 1),",
    ),
    Mutant(
        "MX exponents rounded after codes", "mxfp8", "formats.mx.encode", "EncodeMx._groups",
        "np.copyto(exponents[:, None], powers,", "np.copyto(exponents[:, None], powers + 1,",
    ),
    Mutant(
        "MX called groups of 64", "mxfp8", "formats.mx.format", "mx_group_config",
        '"group_size": BLOCK', '"group_size": 2 * BLOCK',
    ),
    Mutant(
        "MXFP4 codes exchanged in bytes", "mxfp4 beside fp8", "ops.fp4", "pack",
        "np.bitwise_or(pairs, beside, out=pairs)",
        "np.bitwise_or(pairs << 4, pairs >> 8, out=pairs)",
    ),
    Mutant(
        "INT8 scales of other rows", "int8", "formats.int_packed.packers", "KeepInt8.pack",
        "_put(codes.scale, scale)", "_put(np.roll(codes.scale, 1), scale)",
    ),
    Mutant(
        "INT8 codes packed", "int8", "formats.int_packed.packers", "KeepInt8.pack",
        "kept.type.shape), codes.codes)", "kept.type.shape), codes.codes ^ -128)",
    ),
    Mutant(
        "INT8's list without what stays", "int8", "passes.quantize", "compressed_block",
        "compressed_config(groups, left,", 'compressed_config(groups, ["lm_head"],',
    ),
    # --- NVFP4
    Mutant(
        "E2M1 codes exchanged in bytes", "nvfp4", "ops.fp4", "pack",
        "np.bitwise_or(pairs, beside, out=pairs)",
        "np.bitwise_or(pairs << 4, pairs >> 8, out=pairs)",
    ),
    Mutant(
        "E2M1 codes without a sign", "nvfp4", "ops.fp4", "to_codes",
        "np.multiply(spare, _SIGN, out=out)", "np.multiply(spare, 0, out=out)",
    ),
    Mutant(
        "E2M1 rounded up", "nvfp4 packed", "ops.fp4", "to_codes",
        "np.float32(halfway)", "np.float32(halfway - 0.25)",
    ),
    Mutant(
        "E4M3 scales one on", "nvfp4", "formats.nvfp4.encode", "_blocks",
        "np.multiply(each, global_scale, out=each)\n    else", "scale[:] = np.roll(scale, 1)\n    else",
    ),
    Mutant(
        "the last block scale that was tried", "nvfp4 searched", "formats.nvfp4.encode", "best_scales",
        "better = usable & (error < best)", "better = usable",
    ),
    Mutant(
        "searched block scales without their codes", "nvfp4 searched", "formats.nvfp4.encode",
        "best_scales", "np.copyto(scale, code, where=better", "np.copyto(scale, first, where=better",
    ),
    Mutant(
        "own scale inverted", "nvfp4 packed", "formats.nvfp4.scales", "OwnScale.run",
        "own[np.isinf(own)] = 1", "np.divide(1, own, out=own)",
    ),
    Mutant(
        "own scales of modelopt half as large", "nvfp4", "formats.nvfp4.scales", "OwnScale.run",
        "np.divide(amax, np.float32(RANGE), out=own)", "np.divide(amax, np.float32(2 * RANGE), out=own)",
    ),
    Mutant(
        "gate and up with scales of their own", "nvfp4", "passes.shared_scales", "shared_groups",
        "if len(joined) > 1", "if not joined",
    ),
    Mutant(
        "another strategy in the config", "nvfp4 packed", "formats.nvfp4.format", "group_config",
        '"strategy": "tensor_group"', '"strategy": "group"',
    ),
    Mutant(
        "modelopt's list without heads", "nvfp4", "passes.nvfp4", "_modelopt_block",
        "ignored_globs(plan, others, ", "(lambda *a: [])(plan, others, ",
    ),
    Mutant(
        "the other dialect, read", "dequant nvfp4", "formats.nvfp4.decode", "factors",
        'if dialect == "modelopt":', 'if dialect != "modelopt":',
    ),
    Mutant(
        "E2M1's largest size, read", "dequant nvfp4 packed", "ops.fp4", "SIZES",
        "3.0, 4.0, 6.0", "3.0, 4.0, 5.0",
    ),
    Mutant(
        "E4M3's bias off by one, NVFP4", "dequant nvfp4", "ops.fp4", "from_e4m3",
        "2.0**120", "2.0**119",
    ),
    Mutant(
        "block scales of other rows, NVFP4", "dequant nvfp4", "formats.nvfp4.decode", "DequantNvfp4.run",
        "factors(scale[start:stop],", "factors(scale[start:stop][::-1],",
    ),
    Mutant(
        "global scales of others", "dequant nvfp4 packed", "formats.nvfp4.format", "read",
        "names = [f\"{module}.{own.weight}\", f\"{module}.{own.scale}\", last]",
        "names = [f\"{module}.{own.weight}\", f\"{module}.{own.scale}\", "
        "last.replace('up_', '_').replace('gate_', 'up_').replace('._', '.gate_')]",
    ),
    Mutant(
        "exponents of MXFP4 one less", "nvfp4 of mxfp4", "formats.nvfp4.relabel", "_power_code",
        "(power + 7) << 3", "(power + 6) << 3",
    ),
    Mutant(
        "own scales of MXFP4 multiply", "nvfp4 of mxfp4", "formats.nvfp4.relabel", "RelabelOwn.run",
        "power = -power", "power = +power",
    ),
    Mutant(
        "exponents of MXFP4 of other rows", "nvfp4 of mxfp4", "formats.nvfp4.relabel",
        "RelabelBlocks.run", "np.array(table, np.uint8)[scale][..., None]",
        "np.array(table, np.uint8)[scale[::-1]][..., None]",
    ),
    Mutant(
        "gate and up of MXFP4 with scales of their own", "relabel mxfp4 to nvfp4",
        "passes.mxfp4_as_nvfp4", "as_nvfp4", "in shared_groups(kinds)",
        "in ((module,) for module in kinds)",
    ),
    # --- linear attention
    Mutant(
        "rows of fused projections from the last group on", "interleave", "core.row_order",
        "RowOrder.runs", "yield segment, group * size, (group + 1) * size",
        "yield segment, (self.groups - 1 - group) * size, (self.groups - group) * size",
    ),
    Mutant(
        "interleaved by half as many heads", "interleave", "passes.fuse", "_moved",
        "RowOrder(qkvz, target), range(4)", "RowOrder(qkvz, target // 2), range(4)",
    ),
    Mutant(
        "k before q", "fuse", "passes.fuse", "_moved",
        "chosen = [sets[i] for i in members]",
        "chosen = [sets[{0: 1, 1: 0}.get(i, i)] for i in members]",
    ),
    Mutant(
        "a before b", "unfuse", "passes.fuse", "_moved",
        "zip((_Z, _B, _A), origin[3:]", "zip((_Z, _A, _B), origin[3:]",
    ),
    Mutant(
        "block scales left where they were", "unfuse", "passes.fused_rows", "_layout_of",
        "return layout.of_blocks(block[0])", "return RowOrder(layout.of_blocks(block[0]).segments, 1)",
    ),
    Mutant(
        "zero points in the order of another fusion", "fuse packed", "passes.fused_rows", "_of_words",
        "return layout.of_blocks(word)",
        "return RowOrder(layout.of_blocks(word).segments, 2 * layout.groups)",
    ),
    Mutant(
        "scales of groups left where they were", "fuse packed", "passes.fused_rows", "_layout_of",
        "shape[:1] == rows:\n        return layout",
        "shape[:1] == rows:\n        return RowOrder(layout.segments, 2 * layout.groups)",
    ),
    Mutant(
        "another order in the manifest", "fuse", "passes.fuse", "_reorder",
        "FACT: target", "FACT: 4",
    ),
    Mutant(
        "no fused name in the ignore list", "fuse, listed apart", "passes.fuse", "_reorder",
        "config=complete_ignore_lists(plan.config, _unquantized(tensors, moved))", "config=plan.config",
    ),
    # --- encodings that are decoded, and codes in other forms
    Mutant(
        "MXFP4 nibbles exchanged", "dequant mxfp4", "formats.mx.decode", "_table",
        "codes[:, byte & 15] | codes[:, byte >> 4]", "codes[:, byte >> 4] | codes[:, byte & 15]",
    ),
    Mutant(
        "exponents of MXFP4 biased by 128", "dequant mxfp4", "formats.mx.decode", "_table",
        "[:, None] - 127", "[:, None] - 128",
    ),
    Mutant(
        "exponents of other blocks", "dequant mxfp4", "formats.mx.decode", "DequantMxfp4.run",
        "np.multiply(scale[start:stop, None],", "np.multiply(scale[start:stop][::-1, None],",
    ),
    Mutant(
        "gpt-oss: rows of other columns", "dequant gpt-oss", "formats.mx.decode",
        "DequantMxfp4Columns.run",
        "array(made.data, np.uint16, kind.shape).T", "array(made.data, np.uint16, kind.shape)[::-1].T",
    ),
    Mutant(
        "gpt-oss: scales of another expert", "dequant gpt-oss", "passes.dequant", "_unstacked",
        "plan.tensors[scales].index(expert)", "plan.tensors[scales].index(experts - 1 - expert)",
    ),
    Mutant(
        "INT8 without its zero points", "dequant int8", "formats.int_packed.decode",
        "DequantInt8._products",
        "zero = (stored ^ np.uint8(_MIDDLE)).astype(np.uint16)",
        "zero = np.full_like(stored, _MIDDLE).astype(np.uint16)",
    ),
    Mutant(
        "AutoAWQ in the order of GPTQ", "dequant awq", "formats.int_packed.awq", "awq_rows",
        "enumerate(places or AWQ_PLACES)", "enumerate(range(WORD))",
    ),
    Mutant(
        "zero points of AutoAWQ less one", "dequant awq", "formats.int_packed.awq",
        "DequantAwq._products",
        "self.first + rows).astype(np.uint16)", "self.first + rows).astype(np.uint16) + 1",
    ),
    Mutant(
        "zero points one off", "relabel awq", "formats.int_packed.awq", "DequantAwq.integers",
        "zero[:] = self.unpacked(at, 0, codes.shape[0]).view(np.int8) - np.int8(MIDDLE)",
        "zero[:] = self.unpacked(at, 0, codes.shape[0]).view(np.int8) - np.int8(7)",
    ),
    Mutant(
        "scales of other groups", "relabel awq to gptq", "formats.int_packed.awq",
        "DequantAwq.integers", "exact_scales(ins[1]).T, None", "exact_scales(ins[1])[::-1].T, None",
    ),
    Mutant(
        "the scale of the next smaller exponent", "relabel mxfp4", "formats.fp8.from_mxfp4",
        "MxToBlockFp8.run", "largest - SHIFT, top", "largest - SHIFT - 1, top",
    ),
    Mutant(
        "rows of a block from the last on", "relabel mxfp4", "formats.fp8.from_mxfp4",
        "MxToBlockFp8.run", "target[part] = made", "target[part] = made[::-1]",
    ),
    Mutant(
        "a multiplier where a divisor is read", "relabel nvfp4", "formats.nvfp4.relabel",
        "Reciprocal.run", "near = one / value", "near = value.copy()",
    ),
    # --- what is left out
    Mutant(
        "more dropped than draft layers", "drop", "passes.drop", "Drop.__call__",
        "return family.is_mtp(name, dims)",
        'return family.is_mtp(name, dims) or name.endswith("1.input_layernorm.weight")',
    ),
    Mutant(
        "draft layers dropped and still counted", "drop", "passes.drop", "_without_mtp",
        "kept[key] = 0", "kept[key] = value",
    ),
    Mutant(
        "scales of a cache left out beside a block", "w4a16 beside a cache",
        "passes.replace_weights", "replace_weights", "if block is None:", "if True:",
    ),
    Mutant(
        "scales of other tensors left out as a cache's", "dequant beside a cache",
        "passes.replace_weights", "_is_of_cache", "name.endswith(KV_SCALES) and output.type.numel == 1",
        "name.endswith((*KV_SCALES, 'input_layernorm.weight'))",
    ),
    Mutant(
        "no quantization block left out", "dequant", "passes.replace_weights",
        "replace_weights", "config = without_quantization(plan.config)", "config = dict(plan.config)",
    ),
    # --- compiled loops
    Mutant(
        "loops: FP8 scales of the first column", "dequant", "ops.compiled.loops.fp8", "fp8_decode",
        "np.float32(factor[shown, block] * _BIAS)", "np.float32(factor[shown, 0] * _BIAS)",
    ),
    Mutant(
        "loops: FP8 codes without a scale", "fp8 rows", "ops.compiled.loops.fp8", "fp8_encode",
        ", step, whole, codes[", ", np.float32(1), whole, codes[",
    ),
    Mutant(
        "loops: AMX scales off", "amx int4", "ops.compiled.loops.amx", "amx_int4",
        "scale[row] = step", "scale[row] = np.float32(step * np.float32(1.1))",
    ),
    Mutant(
        "loops: INT4 codes of the first group", "w4a16", "ops.compiled.loops.ints", "ints_round",
        "_codes(weight[group], ", "_codes(weight[0], ",
    ),
    Mutant(
        "loops: INT4 packed with scales of one group", "w4a16 of 32", "ops.compiled.loops.ints",
        "ints_round_pack", "scale[group] = np.uint16(", "scale[first] = np.uint16(",
    ),
    Mutant(
        "loops: every code the last", "asymmetric", "ops.compiled.loops.ints",
        "ints_round_any", "_codes_bf16(weight[group], step, middle, first,",
        "_codes_bf16(weight[group], step, middle, last,",
    ),
    Mutant(
        "loops: GPTQ's scales halved", "gptq", "ops.compiled.loops.ints", "ints_round_any",
        "scale[group], zero[group] = step,", "scale[group], zero[group] = np.float32(step / 2),",
    ),
    Mutant(
        "loops: another scale than the codes'", "w4a16 searched", "ops.compiled.loops.search",
        "ints_search", "zero[group] = step,", "zero[group] = tried[chosen - 1],",
    ),
    Mutant(
        "loops: searched codes without their scale's sign", "w4a16 searched",
        "ops.compiled.loops.search", "ints_search", "weight[group], np.float32(np.float32(1) / step)",
        "weight[group], np.float32(np.float32(1) / tried[chosen])",
    ),
    Mutant(
        "loops: AMX searched scales twice as large", "amx search", "ops.compiled.loops.amx",
        "amx_search", "np.float32(step * np.float32(1 / 16))", "np.float32(step * np.float32(1 / 8))",
    ),
    Mutant(
        "loops: NVFP4 block scales of other factors", "nvfp4 searched", "ops.compiled.loops.fp4",
        "_nvfp4_best", "return best, found", "return best, factor",
    ),
    Mutant(
        "loops: NVFP4 block scales one on", "nvfp4", "ops.compiled.loops.fp4", "nvfp4_encode",
        "_nvfp4_scales(sizes[:count], own,",
        "_nvfp4_scales(sizes[:count], np.float32(own * np.float32(2)),",
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("case", sampled(CASES))
def test_right_lines_have_no_finding(case: str, bench: Bench) -> None:
    golden.same_tensors(f"test_mutants.py: {case}", bench.sound(case))
    assert bench.findings(case, bench.sound(case)) == []


def test_every_mutant_stands_in_the_source() -> None:
    """Of all lists, in a moment: a place that was renamed is told of before CI runs the mutant."""
    compared = [s for s in golden.sections("outputs.txt") if s.startswith("test_mutants.py: ")]
    assert len(compared) == len(CASES)
    assert all(changed(mutant) for mutant in (*MUTANTS, *CALIBRATED_MUTANTS))


@pytest.mark.parametrize("mutant", sampled(MUTANTS, 3, name=lambda mutant: mutant.name))
def test_a_wrong_line_is_found(
    mutant: Mutant, bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = bench.sound(mutant.case)
    loops = mutant.module.startswith("ops.compiled.")
    monkeypatch.setenv("QCONVERT_KERNELS", "numba" if loops else "numpy")
    with applied(mutant):
        out = bench.converted(mutant.case, tmp_path / "out")
        findings = bench.findings(mutant.case, out)
    assert differ(out, sound), "it makes the same output: it is no mutant"
    assert found_wrong(findings), "not found, and the report says that the weights are proved"


def test_right_lines_are_back_afterwards(bench: Bench, tmp_path: Path) -> None:
    sound, mutant = bench.sound("amx int4"), MUTANTS[0]
    with applied(mutant):
        assert differ(bench.converted(mutant.case, tmp_path / "wrong"), sound)
    assert not differ(bench.converted(mutant.case, tmp_path / "right"), sound)
