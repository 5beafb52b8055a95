"""Broken repos that headers, config and side files give away: see tests/broken_repos.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gdn_models
from broken_repos import (
    EMBEDDINGS,
    GDN,
    HEAD,
    MANIFEST,
    Bench,
    Repo,
    bf16_ones,
    broken,
    change,
    edit_config,
    edit_manifest,
    edit_receipt,
    experts_model,
    gdn_model,
    home,
    packed_moe,
    resized,
)
from checkpoints import (
    INDEX,
    Tensor,
    copied,
    edit_header,
    edit_json,
    fp8_moe,
    fp8_weight,
    read_tensors,
    tensor,
    unjudged,
    without,
    write_shard,
)

AT = "model.layers.1"
Q = "model.layers.0.self_attn.q_proj"
UP = f"{AT}.mlp.experts.1.up_proj"


# --- Cannot be opened ----------------------------------------------------------------------------


@broken("QC001")
def _a_shard_is_cut_short(bench: Bench) -> Repo:
    folder = bench.copy("moe_fp8")
    file = home(folder, HEAD)
    file.write_bytes(file.read_bytes()[:-16])
    return Repo(folder)


@broken("QC001", "vllm#34859")
def _a_shard_is_missing(bench: Bench) -> Repo:
    """Loaders that glob take what is there, without a word."""
    folder = bench.copy("moe_fp8")
    home(folder, HEAD).unlink()
    return Repo(folder)


@broken("QC001", "mlx-vlm#624")
def _the_source_s_index_is_copied_over_the_right_one(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    shutil.copy(bench.sound("moe_fp8") / INDEX, folder / INDEX)
    return Repo(folder)


@broken("QC001")
def _killed_midway(bench: Bench) -> Repo:
    """Converted in place, shard by shard: the first is bf16, index and config still say FP8."""
    folder = bench.copy("moe_fp8")
    first = min(folder.glob("*.safetensors"))
    write_shard(
        first,
        {
            name: tensor("BF16", *value.shape) if value.dtype == "F8_E4M3" else value
            for name, value in read_tensors_of(first).items()
            if not name.endswith("_scale_inv")
        },
    )
    return Repo(folder)


def read_tensors_of(file: Path) -> dict[str, Tensor]:
    return {n: t for n, t in read_tensors(file.parent).items() if home(file.parent, n) == file}


@broken("QC001")
def _two_outputs_in_one_folder(bench: Bench) -> Repo:
    """A tensor in two shards, and no index left to say which counts."""
    folder = bench.copy("moe_bf16")
    (folder / INDEX).unlink()
    write_shard(folder / "model-00003-of-00003.safetensors", {HEAD: tensor("BF16", 10, 8)})
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        (folder / name).rename(folder / name.replace("of-00002", "of-00003"))
    return Repo(folder)


@broken("QC002")
def _a_conversion_goes_on(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    (folder / ".qconvert").mkdir()
    return Repo(folder)


# --- Quantized, and never loaded so ---------------------------------------------------------------


@broken("QC095")
def _a_quantized_embedding(bench: Bench) -> Repo:
    """Every matrix taken for a linear layer."""
    model = fp8_moe()
    model.tensors |= fp8_weight("model.embed_tokens", 10, 8)
    return bench.write(model)


@broken("QC095")
def _a_quantized_table_of_positions(bench: Bench) -> Repo:
    """In a family that nobody described: by its name."""
    model = fp8_moe(model_type="nobody_s")
    model.tensors |= fp8_weight("model.wpe", 12, 8)
    return bench.write(model)


# --- Tensors -------------------------------------------------------------------------------------


@broken("QC010")
def _total_size_is_the_source_s(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    size = json.loads((bench.sound("moe_fp8") / INDEX).read_bytes())["metadata"]["total_size"]
    edit_json(folder / INDEX, lambda index: index["metadata"].update(total_size=size))
    resized(folder, INDEX)
    return Repo(folder)


@broken("QC010", severity="warning")
def _total_size_as_published(bench: Bench) -> Repo:
    """Hub repos are often off; no loader minds."""
    folder = bench.copy("moe_bf16")
    edit_json(folder / INDEX, lambda index: index["metadata"].update(total_size=1))
    return Repo(folder)


@broken("QC011")
def _a_scale_without_its_weight(bench: Bench) -> Repo:
    folder = bench.copy("moe_fp8")
    stray = {f"{AT}.self_attn.x_proj.weight_scale_inv": tensor("F32", 1, 1)}
    return Repo(change(folder, lambda tensors: tensors.update(stray)))


@broken("QC011")
def _packed_experts_without_scales(bench: Bench) -> Repo:
    """In no layer, so that no layer stands out."""
    model = packed_moe()
    gone = [name for name in model.tensors if name.endswith(".weight_scale")]
    model.tensors = without(model.tensors, gone)
    return bench.write(model)


@broken("QC011")
def _packed_experts_without_shapes(bench: Bench) -> Repo:
    model = packed_moe()
    gone = [name for name in model.tensors if name.endswith(".weight_shape")]
    model.tensors = without(model.tensors, gone)
    return bench.write(model)


@broken("QC011")
def _shapes_of_weights_that_are_packed_no_more(bench: Bench) -> Repo:
    shape = {f"{Q}.weight_shape": tensor("I64", 2)}
    return Repo(change(bench.copy("moe_bf16"), lambda tensors: tensors.update(shape)))


@broken("QC012")
def _a_nested_block_is_left_after_dequantizing(bench: Bench) -> Repo:
    """Kimi-K2.5 keeps its block in text_config, where it overrides the root's."""

    def nest(config: dict[str, Any]) -> None:
        config["text_config"]["quantization_config"] = {"quant_method": "compressed-tensors"}

    return Repo(edit_config(bench.copy("qwen35"), nest))


@broken("QC012")
def _hf_quant_config_is_left_after_dequantizing(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    quantization = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(quantization))
    return Repo(folder)


@broken("QC012")
def _quantized_under_the_bf16_config(bench: Bench) -> Repo:
    return Repo(
        edit_config(bench.copy("moe_fp8"), lambda config: config.pop("quantization_config"))
    )


@broken("QC013")
def _only_the_resumed_layers_are_indexed(bench: Bench) -> Repo:
    """A resumed run wrote its shards over the earlier ones, and indexed its own layers."""
    folder = bench.copy("moe_bf16")

    def keep(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.0.")]:
            del tensors[name]

    return Repo(change(folder, keep))


@broken("QC013")
def _a_writer_died_and_the_index_was_published(bench: Bench) -> Repo:
    """The tensors it had not come to are missing, and index and headers agree."""
    folder = bench.copy("qwen35_fp8")

    def cut(tensors: dict[str, Tensor]) -> None:
        last = [n for n in tensors if n.startswith("model.language_model.layers.3.mlp.experts.2.")]
        for name in last:
            del tensors[name]

    return Repo(change(folder, cut))


@broken("QC013")
def _untied_and_without_a_head(bench: Bench) -> Repo:
    return Repo(change(bench.copy("moe_bf16"), lambda tensors: tensors.pop(HEAD)))


@broken("QC014")
def _tied_and_of_another_type(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    shape = read_tensors(folder)[HEAD].shape
    return Repo(change(folder, lambda tensors: tensors.update({HEAD: tensor("F32", *shape)})))


@broken("QC015", "transformers#36026")
def _a_ragged_grid_inferred_from_shapes(bench: Bench) -> Repo:
    """As 576 rows in blocks of 128: five scale rows, and 576 // 128 is four."""
    model = fp8_moe()
    model.tensors |= fp8_weight(Q, 18, 8)
    name = f"{Q}.weight_scale_inv"
    rows, columns = model.tensors[name].shape
    model.tensors[name] = tensor("F32", rows - 1, columns)
    return bench.write(model)


@broken("QC015")
def _a_grid_and_no_block_size(bench: Bench) -> Repo:
    def forget(config: dict[str, Any]) -> None:
        del config["quantization_config"]["weight_block_size"]

    return Repo(edit_config(bench.copy("moe_fp8"), forget))


@broken("QC015")
def _one_scale_where_blocks_are_stated(bench: Bench) -> Repo:
    one = {f"{Q}.weight_scale_inv": tensor("F32", 1, 1)}
    return Repo(change(bench.copy("moe_fp8"), lambda tensors: tensors.update(one)))


@broken("QC111")
def _a_scale_of_values_alone(bench: Bench) -> Repo:
    alone = {f"model.layers.{n}.self_attn.v_proj.v_scale": tensor("F32") for n in range(2)}
    return Repo(change(bench.copy("moe_fp8"), lambda tensors: tensors.update(alone)))


@broken("QC111")
def _a_scale_for_each_head(bench: Bench) -> Repo:
    both = {
        f"model.layers.{n}.self_attn.{one}_proj.{one}_scale": tensor("F32", 2)
        for n in range(2)
        for one in "kv"
    }
    return Repo(change(bench.copy("moe_fp8"), lambda tensors: tensors.update(both)))


def renamed(folder: Path, old: str, new: str) -> Path:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if old in n]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return change(folder, rename)


@broken("QC011")
def _block_scales_under_the_other_dialect_s_name(bench: Bench) -> Repo:
    """Loaders of quant_method fp8 have no parameter of that name."""
    return Repo(renamed(bench.copy("moe_fp8"), ".weight_scale_inv", ".weight_scale"))


@broken("QC011")
def _compressed_tensors_with_the_other_dialect_s_scales(bench: Bench) -> Repo:
    folder = bench.copy("moe_fp8")
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 4]}

    def restate(config: dict[str, Any]) -> None:
        listed = config["quantization_config"].get("modules_to_not_convert", [])
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head", "re:.*mlp.gate$", *listed],
        }

    return Repo(edit_config(folder, restate))


@broken("QC044", severity="warning")
def _a_class_s_default_in_text_config(bench: Bench) -> Repo:
    """transformers saves Qwen3-VL so, and loads it untied."""

    def contradict(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = False
        config["text_config"]["tie_word_embeddings"] = True

    return Repo(edit_config(bench.copy("qwen35"), contradict))


@broken("QC046")
def _one_layer_by_the_text_only_name(bench: Bench) -> Repo:
    old = "model.language_model.layers.1."
    return Repo(renamed(bench.copy("qwen35"), old, "model.layers.1."))


@broken("QC048", severity="warning")
def _a_text_only_class_with_multi_modal_names(bench: Bench) -> Repo:
    folder = bench.copy("qwen35_text_tied")
    for part in ("layers.", "embed_tokens.", "norm."):
        renamed(folder, f"model.{part}", f"model.language_model.{part}")
    return Repo(folder)


# --- Two forms of one thing ----------------------------------------------------------------------


def fused_layer(tensors: dict[str, Tensor], at: str) -> dict[str, Tensor]:
    """The projections of a layer, fused in two tensors: rows one after the other."""
    found = {}
    for whole, parts in (("qkvz", ("qkv", "z")), ("ba", ("b", "a"))):
        held = [tensors[f"{at}.in_proj_{part}.weight"] for part in parts]
        rows = sum(value.shape[0] for value in held)
        data = b"".join(value.data for value in held)
        name = f"{at}.in_proj_{whole}.weight"
        found[name] = Tensor("BF16", (rows, held[0].shape[1]), data)
    return found


@broken("QC016")
def _fused_and_split_side_by_side(bench: Bench) -> Repo:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors.update(fused_layer(tensors, GDN))

    return Repo(change(bench.copy("qwen35"), add))


@broken("QC016")
def _stacked_experts_beside_single_ones(bench: Bench) -> Repo:
    stacks = gdn_model(stacked=True).tensors
    stack = {n: t for n, t in stacks.items() if ".layers.2.mlp.experts." in n}
    return Repo(change(bench.copy("qwen35"), lambda tensors: tensors.update(stack)))


@broken("QC016")
def _gate_up_beside_gate_and_up(bench: Bench) -> Repo:
    """sglang's Qwen3.5 drops such a tensor with only a warning."""
    at = "model.language_model.layers.0.mlp.shared_expert"
    more = {f"{at}.gate_up_proj.weight": tensor("BF16", 32, 32)}
    return Repo(change(bench.copy("qwen35"), lambda tensors: tensors.update(more)))


@broken("QC017")
def _one_layer_is_fused(bench: Bench) -> Repo:
    def fuse(tensors: dict[str, Tensor]) -> None:
        tensors.update(fused_layer(tensors, GDN))
        for part in ("qkv", "z", "b", "a"):
            del tensors[f"{GDN}.in_proj_{part}.weight"]

    return Repo(change(bench.copy("qwen35"), fuse))


@broken("QC017")
def _one_layer_s_experts_are_stacked(bench: Bench) -> Repo:
    stacks = gdn_model(stacked=True).tensors

    def swap(tensors: dict[str, Tensor]) -> None:
        at = "model.language_model.layers.2.mlp.experts."
        for name in [n for n in tensors if n.startswith(at)]:
            del tensors[name]
        tensors.update({n: t for n, t in stacks.items() if n.startswith(at)})

    return Repo(change(bench.copy("qwen35"), swap))


@broken("QC018")
def _experts_without_an_up(bench: Bench) -> Repo:
    """In every layer, so that no layer stands out."""

    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n and "up_proj" in n]:
            del tensors[name]

    return Repo(change(bench.copy("moe_bf16"), drop))


@broken("QC018")
def _no_expert_at_all(bench: Bench) -> Repo:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts." in n]:
            del tensors[name]

    return Repo(change(bench.copy("moe_bf16"), drop))


# --- Counts --------------------------------------------------------------------------------------


@broken("QC019")
def _an_expert_too_many(bench: Bench) -> Repo:
    """The router has no row for it."""

    def add(tensors: dict[str, Tensor]) -> None:
        ours = {n: t for n, t in tensors.items() if f"{AT}.mlp.experts.1." in n}
        tensors.update({n.replace("experts.1.", "experts.2."): t for n, t in ours.items()})

    return Repo(change(bench.copy("moe_bf16"), add))


@broken("QC019")
def _a_layer_too_many(bench: Bench) -> Repo:
    """config.json of a cut-down model beside all of its layers."""
    return Repo(
        edit_config(bench.copy("moe_bf16"), lambda config: config.update(num_hidden_layers=1))
    )


@broken("QC023", "llm-compressor#2735", severity="warning")
def _the_draft_layer_was_dropped_in_silence(bench: Bench) -> Repo:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("mtp.")]:
            del tensors[name]

    return Repo(change(bench.copy("qwen35"), drop))


@broken("QC023")
def _half_a_draft_layer(bench: Bench) -> Repo:
    def drop(tensors: dict[str, Tensor]) -> None:
        del tensors["mtp.fc.weight"], tensors["mtp.pre_fc_norm_hidden.weight"]

    return Repo(change(bench.copy("qwen35"), drop))


@broken("QC024")
def _text_only_with_a_vision_config(bench: Bench) -> Repo:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".visual." in n]:
            del tensors[name]

    return Repo(change(bench.copy("qwen35"), drop))


@broken("QC024", severity="warning")
def _a_tower_and_no_vision_config(bench: Bench) -> Repo:
    return Repo(edit_config(bench.copy("qwen35"), lambda config: config.pop("vision_config")))


# --- Shapes and formats --------------------------------------------------------------------------


@broken("QC026")
def _a_stack_with_its_axes_swapped(bench: Bench) -> Repo:
    """[E, I, H] for [E, H, I]: the other family's order."""

    def swap(tensors: dict[str, Tensor]) -> None:
        for name, value in tensors.items():
            if name.endswith("experts.down_proj"):
                e, h, i = value.shape
                tensors[name] = Tensor(value.dtype, (e, i, h), value.data)

    return Repo(change(bench.copy("qwen35_stacked"), swap))


@broken("QC026")
def _config_of_a_wider_sibling(bench: Bench) -> Repo:
    def widen(config: dict[str, Any]) -> None:
        config["text_config"]["linear_num_value_heads"] *= 2

    return Repo(edit_config(bench.copy("qwen35"), widen))


@broken("QC026")
def _embeddings_shorter_than_the_vocabulary(bench: Bench) -> Repo:
    return Repo(edit_config(bench.copy("moe_bf16"), lambda config: config.update(vocab_size=12)))


@broken("QC026")
def _another_number_of_heads(bench: Bench) -> Repo:
    def more(config: dict[str, Any]) -> None:
        config.update(num_attention_heads=8, num_key_value_heads=4, head_dim=2)

    return Repo(edit_config(bench.copy("moe_bf16"), more))


@broken("QC026")
def _queries_without_their_gate(bench: Bench) -> Repo:
    """Qwen3.5's q_proj holds two rows for each of a query."""

    def heads(config: dict[str, Any]) -> None:
        config["text_config"].update(
            num_attention_heads=2, num_key_value_heads=2, head_dim=gdn_models.HIDDEN // 2
        )

    return Repo(edit_config(bench.copy("qwen35"), heads))


@broken("QC047")
def _linear_attention_without_its_sizes(bench: Bench) -> Repo:
    def forget(config: dict[str, Any]) -> None:
        del config["text_config"]["linear_value_head_dim"]

    return Repo(edit_config(bench.copy("qwen35"), forget))


@broken("QC047")
def _linear_attention_with_no_heads(bench: Bench) -> Repo:
    def forget(config: dict[str, Any]) -> None:
        config["linear_num_key_heads"] = 0

    return Repo(edit_config(bench.copy("qwen3_next"), forget))


@broken("QC027", "omlx#2159")
def _exponents_without_a_word(bench: Bench) -> Repo:
    """Multiplied as the numbers they are not, they are off by orders of magnitude."""

    def forget(config: dict[str, Any]) -> None:
        del config["quantization_config"]["scale_fmt"]

    return Repo(edit_config(bench.copy("qwen35_ue8m0"), forget))


@broken("QC027")
def _packed_shapes_as_floats(bench: Bench) -> Repo:
    """A cast of everything to bf16 took shapes along."""
    model = packed_moe()
    for name in [n for n in model.tensors if n.endswith(".weight_shape")]:
        model.tensors[name] = bf16_ones(2)
    return bench.write(model)


@broken("QC027", beside=["QC095"])
def _a_norm_in_fp8(bench: Bench) -> Repo:
    def cast(tensors: dict[str, Tensor]) -> None:
        name = "model.norm.weight"
        tensors[name] = tensor("F8_E4M3", *tensors[name].shape)
        tensors[name + "_scale_inv"] = tensor("F32", 1)

    return Repo(change(bench.copy("moe_fp8"), cast))


@broken("QC135")
def _a_group_without_its_size(bench: Bench) -> Repo:
    """Both loaders refuse it; a rule that knows sizes alone passes it."""
    folder = bench.copy("moe_int4")
    return Repo(
        edit_config(
            folder,
            lambda config: config["quantization_config"]["config_groups"]["group_0"][
                "weights"
            ].update(group_size=None),
        )
    )


@broken("QC135")
def _an_order_that_nobody_states(bench: Bench) -> Repo:
    """GPTQ's readers ask for desc_act, whatever the tensors have."""
    from commands import written

    folder = copied(written("gptq", bench.scratch), bench.scratch / "repo")
    return Repo(edit_config(folder, lambda config: config["quantization_config"].pop("desc_act")))


@broken("QC138", level="full")
def _a_draft_that_has_the_targets_own_numbers(bench: Bench) -> Repo:
    """Sums are stored in place of what is added to a draft token's number."""
    from draft_tables import eagle3, numbers, table, write_draft

    tensors, config = eagle3()
    tensors["d2t"] = table(numbers())
    return Repo(write_draft(bench.scratch / "repo", tensors, config))


@broken("QC138")
def _a_draft_of_few_tokens_without_a_table(bench: Bench) -> Repo:
    from draft_tables import eagle3, write_draft

    tensors, config = eagle3("speculators")
    del tensors["d2t"]
    return Repo(write_draft(bench.scratch / "repo", tensors, config))


@broken("QC038")
def _another_group_size_than_stated(bench: Bench) -> Repo:
    return bench.write(packed_moe(group_size=4))


# --- Seals ---------------------------------------------------------------------------------------


@broken("QC049")
def _a_hash_in_the_receipt_was_edited(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    file = folder / "qconvert.receipt.jsonl"
    text = file.read_text()
    at = text.index('"xxh3":"') + 8
    file.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    return Repo(folder)


@broken("QC049")
def _the_manifest_s_seal_is_of_other_bytes(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"layers": 2', '"layers":\t2'))
    return Repo(folder)


# --- Side files ----------------------------------------------------------------------------------


@broken("QC020")
def _an_unknown_shard_beside_ours(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    write_shard(folder / "extra.safetensors", {"x": tensor("U8", 1)})
    return Repo(folder)


@broken("QC021", "llm-compressor#1418")
def _tokenizer_json_was_written_again(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    text = json.dumps(json.loads((folder / "tokenizer.json").read_bytes()), indent=4)
    (folder / "tokenizer.json").write_text(text)
    return Repo(folder)


@broken("QC028", severity="warning")
def _weights_without_a_tokenizer(bench: Bench) -> Repo:
    folder = bench.copy("moe_fp8")
    (folder / "tokenizer.json").unlink()
    return Repo(folder)


@broken("QC029", "llm-compressor#1305", severity="warning")
def _processor_files_were_left_out(bench: Bench) -> Repo:
    folder = bench.copy("qwen35")
    (folder / "preprocessor_config.json").unlink()
    return Repo(folder)


@broken("QC056", severity="warning")
def _pickles_beside_safetensors(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    (folder / "pytorch_model.bin.index.json").write_text("{}")
    return Repo(folder)


@broken("QC056", severity="warning")
def _a_shard_the_index_does_not_name(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    write_shard(folder / "other.safetensors", {"x": tensor("U8", 1)})
    return Repo(folder)


@broken("QC098")
def _weights_that_vllm_takes_for_mistral_s(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    write_shard(folder / "consolidated.safetensors", {"x": tensor("U8", 1)})
    return Repo(folder)


@broken("QC098")
def _one_file_beside_an_index(bench: Bench) -> Repo:
    """transformers looks for model.safetensors before an index."""
    folder = bench.copy("moe_bf16")
    write_shard(folder / "model.safetensors", {HEAD: tensor("BF16", 10, 8)})
    return Repo(folder)


@broken("QC096")
def _codes_of_another_format_than_stated(bench: Bench) -> Repo:
    def say(config: dict[str, Any]) -> None:
        block = config["quantization_config"]
        block["config_groups"]["group_0"]["weights"].update(type="float", num_bits=8)
        block["format"] = "float-quantized"

    return Repo(edit_config(bench.copy("moe_int4"), say))


@broken("QC097")
def _a_method_that_nothing_judges(bench: Bench) -> Repo:
    def say(config: dict[str, Any]) -> None:
        config["quantization_config"] = {"quant_method": "hqq", "nbits": 4}

    return Repo(edit_config(bench.copy("moe_int4"), say))


@broken("QC099")
def _a_norm_left_out_as_a_scale(bench: Bench) -> Repo:
    def claim(manifest: dict[str, Any]) -> None:
        rule = "dequant: activation scales and shapes beside quantized weights"
        manifest["dropped"] = {rule: ["model.layers.0.self_attn.q_proj.bias"]}

    return Repo(edit_manifest(bench.copy("moe_dequantized"), claim))


@broken("QC057", severity="warning")
def _shards_without_metadata(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    for file in folder.glob("*.safetensors"):
        edit_header(file, lambda table: table.pop("__metadata__"))
    return Repo(folder)


@broken("QC058", severity="warning")
def _remote_code_was_left_out(bench: Bench) -> Repo:
    code = {"AutoConfig": "configuration_x.XConfig", "AutoModel": "owner/x--modeling_x.XModel"}
    return Repo(edit_config(bench.copy("moe_bf16"), lambda config: config.update(auto_map=code)))


@broken("QC059")
def _front_matter_that_is_no_yaml(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    (folder / "README.md").write_text("---\nlicense: [mit\n---\n# A model\n")
    return Repo(folder)


@broken("QC059")
def _front_matter_with_a_date_that_is_none(bench: Bench) -> Repo:
    folder = bench.copy("moe_bf16")
    (folder / "README.md").write_text("---\ndate: 2020-13-45\n---\n# A model\n")
    return Repo(folder)


@broken("QC059", severity="warning")
def _a_relation_to_no_base(bench: Bench) -> Repo:
    folder = bench.copy("moe_fp8")
    (folder / "README.md").write_text("---\nbase_model_relation: quantized\n---\n# A model\n")
    return Repo(folder)


# --- Quantization blocks -------------------------------------------------------------------------


@broken("QC034")
def _an_entry_that_names_more_than_meant(bench: Bench) -> Repo:
    """`mlp.experts` for the router alone."""
    listed = {"modules_to_not_convert": ["lm_head", "mlp.experts"]}
    return Repo(
        edit_config(
            bench.copy("moe_fp8"), lambda config: config["quantization_config"].update(listed)
        )
    )


@broken("QC034")
def _experts_that_no_target_names(bench: Bench) -> Repo:
    def narrow(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["targets"] = [r"re:.*\.block_sparse_moe\..*"]

    return Repo(edit_config(bench.copy("moe_int4"), narrow))


@broken("QC034")
def _an_entry_that_is_no_regular_expression(bench: Bench) -> Repo:
    def spoil(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"].append("re:model[.layers.*")

    return Repo(edit_config(bench.copy("moe_int4"), spoil))


@broken("QC034")
def _a_target_that_is_no_regular_expression(bench: Bench) -> Repo:
    def spoil(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["targets"] = [*group["targets"], "re:*proj"]

    return Repo(edit_config(bench.copy("moe_int4"), spoil))


def relist(config: dict[str, Any], old: str, new: str | None) -> None:
    block = config["quantization_config"]
    listed = block["modules_to_not_convert"]
    block["modules_to_not_convert"] = [
        name.removesuffix(old) + new if name.endswith(old) and new is not None else name
        for name in listed
        if not (name.endswith(old) and new is None)
    ]


@broken("QC035", "sglang#35797")
def _only_the_fused_name_is_listed(bench: Bench) -> Repo:
    """in_proj_ba alone: the runtime asks for its parts, and 95 points on GSM8K become 27."""

    def rename(config: dict[str, Any]) -> None:
        for part in ("in_proj_b", "in_proj_a"):
            relist(config, part, None)

    return Repo(edit_config(bench.copy("qwen35_fp8"), rename))


@broken("QC035")
def _names_of_another_prefix(bench: Bench) -> Repo:
    """Renamed tensors, and a list that did not follow: nothing of it fits any more."""

    def rename(config: dict[str, Any]) -> None:
        block = config["quantization_config"]
        block["modules_to_not_convert"] = [
            name.replace("model.language_model.", "language_model.model.")
            for name in block["modules_to_not_convert"]
        ]

    return Repo(edit_config(bench.copy("qwen35_fp8"), rename))


@broken("QC035")
def _bf16_attention_nobody_lists(bench: Bench) -> Repo:
    """Dequantized in part, under the config as it was."""

    def cast(tensors: dict[str, Tensor]) -> None:
        tensors[f"{Q}.weight"] = tensor("BF16", *tensors[f"{Q}.weight"].shape)
        del tensors[f"{Q}.weight_scale_inv"]

    # Other layers' q_proj have scales, so the family misses this one's.
    return Repo(change(bench.copy("moe_fp8"), cast))


@broken("QC035", severity="warning")
def _only_the_parts_are_listed(bench: Bench) -> Repo:
    return Repo(
        edit_config(bench.copy("qwen35_fp8"), lambda config: relist(config, "in_proj_ba", None))
    )


def draft_int4(ignore: list[str]) -> Any:
    """DeepSeek's draft layer with bf16 attention, beside packed experts."""
    import models

    from qconvert.core.dtypes import ceil_div

    model = models.deepseek_v3()
    group = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
        "symmetric": True,
    }
    made: dict[str, Tensor] = {}
    for name, value in model.tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if ".experts." not in name:
            made[name] = value if value.dtype != "F8_E4M3" else bf16_ones(*value.shape)
            continue
        module, (rows, columns) = name.removesuffix(".weight"), value.shape
        made[f"{module}.weight_packed"] = tensor("I32", rows, columns // 8)
        made[f"{module}.weight_scale"] = bf16_ones(rows, ceil_div(columns, 128))
        made[f"{module}.weight_shape"] = tensor("I64", 2)
    model.tensors = made
    model.config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
        "ignore": [
            "lm_head",
            r"re:model\.layers\.[01]\.(self_attn|mlp\.[a-z_]*(proj|shared)).*",
            *ignore,
        ],
    }
    return model


@broken("QC036", severity="warning")
def _draft_layers_listed_by_patterns_alone(bench: Bench) -> Repo:
    """Patterns with escaped dots do not survive the draft model's renaming."""
    return bench.write(draft_int4([r"re:model\.layers\.2\.(self_attn|mlp\.shared).*"]))


@broken("QC035", severity="warning")
def _parts_listed_for_a_class_without_a_mapping(bench: Bench) -> Repo:
    """sglang's DeepSeek finds no scheme for gate_up_proj, and refuses the folder."""
    model = draft_int4([r"re:model\.decoder\.(?!mlp\.experts\.).*"])
    ignore = model.config["quantization_config"]["ignore"]
    ignore[1] = r"re:model\.layers\.[01]\.(self_attn|mlp\.(shared_experts\.)?(gate|up|down)_proj).*"
    ignore.append(r"re:model\.layers\.2\.(self_attn|mlp\.shared).*")
    return bench.write(model)


@broken("QC037")
def _a_stale_nested_block(bench: Bench) -> Repo:
    """The root says FP8 in blocks; nested, the release's own INT4 overrides it."""
    block = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
    return Repo(
        edit_config(
            bench.copy("qwen35_fp8"),
            lambda config: config["text_config"].update(quantization_config=block),
        )
    )


@broken("QC037", severity="warning")
def _hf_quant_config_of_another_format(bench: Bench) -> Repo:
    folder = bench.copy("moe_fp8")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    return Repo(folder)


@broken("QC039")
def _two_lists(bench: Bench) -> Repo:
    def add(config: dict[str, Any]) -> None:
        config["quantization_config"]["ignored_layers"] = ["model.norm", "lm_head"]
        config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]

    return Repo(edit_config(bench.copy("moe_fp8"), add))


# --- What our own files say ----------------------------------------------------------------------


@broken("QC030", "Model-Optimizer#733")
def _the_receipt_does_not_know_a_draft_tensor(bench: Bench) -> Repo:
    """A tensor of the source that nothing was made of, and that no rule drops."""
    folder = bench.copy("without_drafts")

    def forget(manifest: dict[str, Any]) -> None:
        for names in manifest["dropped"].values():
            names.remove("mtp.fc.weight")

    edit_manifest(folder, forget)
    return Repo(folder, bench.sound("qwen35_fp8"))


@broken("QC031")
def _another_fine_tune_is_named_as_source(bench: Bench) -> Repo:
    other = bench.copy("moe_fp8")
    file = home(other, HEAD)
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    return Repo(bench.sound("moe_dequantized"), other)


@broken("QC032", "llm-compressor#1305")
def _a_side_file_did_not_come_along(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")
    (folder / "generation_config.json").unlink()
    edit_receipt(folder, lambda line: line["file"] != "generation_config.json")
    return Repo(folder, bench.sound("moe_fp8"))


@broken("QC040")
def _the_manifest_states_another_numa_count(bench: Bench) -> Repo:
    folder = bench.copy("cpu")
    return Repo(edit_manifest(folder, lambda manifest: manifest["amx"].update(numa=1)))


@broken("QC040")
def _the_manifest_states_another_method(bench: Bench) -> Repo:
    folder = bench.copy("cpu")
    return Repo(edit_manifest(folder, lambda manifest: manifest["amx"].update(method="AMXINT8")))


@broken("QC043", beside=["QC031"])
def _another_model_is_named_as_source(bench: Bench) -> Repo:
    model = experts_model()
    model.config["num_experts"] = 1
    model.tensors = {
        name: tensor("BF16", 1, 128) if name.endswith("mlp.gate.weight") else value
        for name, value in model.tensors.items()
        if ".experts.1." not in name
    }
    other = model.write(bench.scratch / "other")
    folder = bench.copy("cpu")
    return Repo(folder, other)


@broken("QC050")
def _halves_of_two_pairs(bench: Bench) -> Repo:
    gpu = bench.copy("gpu")
    edit_manifest(gpu, lambda manifest: manifest["pair"].update(id="0" * 32))
    return Repo(bench.sound("cpu"), pair=gpu)


@broken("QC051")
def _said_to_be_split(bench: Bench) -> Repo:
    folder = bench.copy("fused_for_sglang")
    return Repo(edit_manifest(folder, lambda manifest: manifest.update(gdn_groups=0)))


@broken("QC052")
def _interleaved_under_qwen3_5(bench: Bench) -> Repo:
    """The rows of a Qwen3-Next repo under the other class's name: every loader takes it."""
    folder = bench.copy("as_qwen3_next")

    def rename(config: dict[str, Any]) -> None:
        config.update(model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"])

    return Repo(edit_config(folder, rename))


@broken("QC052")
def _contiguous_under_qwen3_next(bench: Bench) -> Repo:
    folder = bench.copy("as_qwen3_next")
    return Repo(edit_manifest(folder, lambda manifest: manifest.update(gdn_groups=1)))


@broken("QC052")
def _split_under_qwen3_next(bench: Bench) -> Repo:
    """Split, and the class was left: no loader of it knows the names."""
    folder = bench.copy("as_qwen35")

    def rename(config: dict[str, Any]) -> None:
        config.update(model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"])

    return Repo(edit_config(folder, rename))


@broken("QC052")
def _split_under_qwen3_next_without_a_manifest(bench: Bench) -> Repo:
    folder = bench.scratch / "split"
    unjudged("passes: [unfuse]", bench.sound("qwen3_next"), folder)
    for file in (MANIFEST, "qconvert.receipt.jsonl"):
        (folder / file).unlink()
    return Repo(folder)


@broken("QC052", severity="warning")
def _fused_and_no_word_in_which_order(bench: Bench) -> Repo:
    """Only sglang takes it, and only if it is contiguous."""
    folder = bench.copy("fused_for_sglang")
    for file in (MANIFEST, "qconvert.receipt.jsonl"):
        (folder / file).unlink()
    return Repo(folder)


@broken("QC053")
def _said_to_be_dequantized(bench: Bench) -> Repo:
    folder = bench.copy("moe_copied")
    step = {"name": "dequant", "options": {}, "matched": 20, "expected": 20}
    return Repo(edit_manifest(folder, lambda manifest: manifest["passes"].append(step)))


@broken("QC053")
def _the_other_side_of_a_pair(bench: Bench) -> Repo:
    folder = bench.copy("gpu")
    return Repo(edit_manifest(folder, lambda manifest: manifest["pair"].update(side="cpu")))


@broken("QC054", beside=["QC013", "QC023"])
def _a_stage_under_another_number(bench: Bench) -> Repo:
    """Folders renamed by hand: its layers are the first stage's, its manifest the second's."""
    folder = bench.copy("stages")
    other = json.loads((folder / "stage-01-of-02" / MANIFEST).read_bytes())["stage"]
    first = folder / "stage-00-of-02"
    edit_manifest(first, lambda manifest: manifest.update(stage=other))
    # What the second stage has to hold is missing, too.
    return Repo(first)


@broken("QC054")
def _a_partition_of_another_model(bench: Bench) -> Repo:
    folder = bench.copy("stages") / "stage-00-of-02"

    def repartition(manifest: dict[str, Any]) -> None:
        stage = manifest["stage"]
        stage["partition"] = [2, 3]
        stage["environment"] = dict.fromkeys(stage["environment"], "2,3")

    return Repo(edit_manifest(folder, repartition))


@broken("QC054")
def _a_stage_that_contradicts_itself(bench: Bench) -> Repo:
    folder = bench.copy("stages") / "stage-00-of-02"
    return Repo(edit_manifest(folder, lambda manifest: manifest["stage"].update(number=7)))


@broken("QC055")
def _dropped_and_there(bench: Bench) -> Repo:
    folder = bench.copy("moe_dequantized")

    def claim(manifest: dict[str, Any]) -> None:
        options = {"what": None, "match": "*e*.weight", "why": "a base model"}
        step = {"name": "drop", "options": options, "matched": 2, "expected": None}
        manifest["passes"].insert(0, step)
        manifest["dropped"] = {"drop: a base model": [HEAD, EMBEDDINGS]}

    return Repo(edit_manifest(folder, claim))
