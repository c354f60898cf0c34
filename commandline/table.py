"""The table of commands. A command is imported only when it is run."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """The module of a command, its group in the overview, its purpose, and a line to copy. ranks:
    with `-sm graph` it runs as one process per device. chunks: with `-sm data` as well, each
    process with other chunks of a text.
    """

    # `module` is relative to the package.
    module: str
    group: str
    help: str
    example: str
    ranks: bool = False
    chunks: bool = False


COMMANDS = {
    "auto": Command(
        ".proof.auto_command",
        "make",
        "make a quantized file of a given size from a checkpoint, with proof that it is good",
        "iqforge auto ./Qwen3-8B --target-size 5G",
    ),
    "convert": Command(
        ".convert.commands.convert",
        "make",
        "convert a Hugging Face checkpoint to GGUF",
        "iqforge convert ./Qwen3-8B --outfile qwen3-8b-bf16.gguf",
    ),
    "convert-lora": Command(
        ".convert.commands.convert_lora",
        "make",
        "convert a LoRA adapter to GGUF",
        "iqforge convert-lora ./my-adapter --base ./Qwen3-8B",
    ),
    "export-lora": Command(
        ".formats.commands.export_lora",
        "make",
        "merge LoRA adapters into a model",
        "iqforge export-lora -m model-bf16.gguf --lora adapter.gguf -o merged.gguf",
    ),
    "imatrix": Command(
        ".imatrix.commands.imatrix",
        "make",
        "collect an importance matrix, or add up several",
        "iqforge imatrix -m model-bf16.gguf -f calibration.txt -o model.imatrix.gguf",
        chunks=True,
    ),
    "imatrix-convert": Command(
        ".imatrix.commands.imatrix_convert",
        "make",
        "convert an importance matrix between .dat and .gguf",
        "iqforge imatrix-convert imatrix.dat imatrix.gguf",
    ),
    "hessian": Command(
        ".imatrix.commands.hessian",
        "make",
        "collect second moments, for better rounding than an importance matrix gives",
        "iqforge hessian -m model-bf16.gguf -f prose.txt -f code.txt -o model.hessian.safetensors",
    ),
    "quantize": Command(
        ".quantize.commands.quantize",
        "make",
        "quantize a GGUF file or a checkpoint",
        "iqforge quantize --imatrix m.imatrix model-bf16.gguf model-iq4_k.gguf IQ4_K",
    ),
    "repack": Command(
        ".quantize.commands.repack",
        "make",
        "interleave the rows of a GGUF file's tensors, or undo it",
        "iqforge repack model-iq4_k.gguf model-iq4_k_r4.gguf",
    ),
    "gguf-split": Command(
        ".formats.commands.gguf_split",
        "make",
        "split a GGUF file into shards, or merge them",
        "iqforge gguf-split --split-max-size 40G model.gguf model",
    ),
    "merge-gate-up": Command(
        ".formats.commands.merge_gate_up",
        "make",
        "merge gate and up of a GGUF file's experts, or split them",
        "iqforge merge-gate-up model.gguf model-merged.gguf",
    ),
    "perplexity": Command(
        ".runtime.commands.perplexity",
        "measure",
        "measure perplexity, or KL divergence from another model",
        "iqforge perplexity -m model-iq4_k.gguf -f wiki.test.raw",
        ranks=True,
        chunks=True,
    ),
    "compare": Command(
        ".proof.compare_command",
        "measure",
        "compare models with the one that they were made of",
        "iqforge compare model-bf16.gguf model-*.gguf -f wiki.test.raw --html compare.html",
    ),
    "validate": Command(
        ".quantize.commands.validate",
        "measure",
        "read a GGUF file back and measure its errors against its source",
        "iqforge validate model-iq4_k.gguf --against model-bf16.gguf",
    ),
    "quantize-stats": Command(
        ".quantize.commands.quantize_stats",
        "measure",
        "measure what each type would lose on each tensor",
        "iqforge quantize-stats model-bf16.gguf --type IQ3_K IQ4_K --html stats.html",
    ),
    "sensitivity": Command(
        ".imatrix.commands.sensitivity",
        "measure",
        "measure how much a model suffers from errors in each tensor",
        "iqforge sensitivity -m model-bf16.gguf -f wiki.test.raw -o sensitivity.json",
    ),
    "imatrix-compare": Command(
        ".imatrix.commands.imatrix_compare",
        "measure",
        "measure how much two importance matrices differ",
        "iqforge imatrix-compare one.dat other.gguf",
    ),
    "imatrix-coverage": Command(
        ".imatrix.commands.imatrix_coverage",
        "measure",
        "count the tokens that each expert saw",
        "iqforge imatrix-coverage imatrix.gguf",
    ),
    "generate": Command(
        ".runtime.commands.generate",
        "run",
        "continue a prompt",
        'iqforge generate -m model-iq4_k.gguf -p "The capital of France is" -n 64',
        ranks=True,
    ),
    "chat": Command(
        ".runtime.commands.chat",
        "run",
        "talk to a model",
        "iqforge chat -m model-iq4_k.gguf",
        ranks=True,
    ),
    "embedding": Command(
        ".runtime.commands.embedding",
        "run",
        "print embeddings of texts",
        'iqforge embedding -m model-iq4_k.gguf -p "The capital of France" --pooling last',
    ),
    "tokenize": Command(
        ".runtime.commands.tokenize",
        "run",
        "print the tokens of a text",
        'iqforge tokenize -m model-iq4_k.gguf -p "The capital of France"',
    ),
    "plan-split": Command(
        ".runtime.commands.plan_split",
        "run",
        "print how a model is split over GPUs",
        "iqforge plan-split model-iq4_k.gguf -ts 1,1,1,1",
    ),
    "bench": Command(
        ".runtime.commands.speed.bench",
        "run",
        "measure the speed of prompts and of generation",
        "iqforge bench -m model-iq4_k.gguf -p 512 -n 128",
        ranks=True,
    ),
    "sweep-bench": Command(
        ".runtime.commands.speed.sweep_bench",
        "run",
        "measure speed as the context fills",
        "iqforge sweep-bench -m model-iq4_k.gguf -c 8192",
        ranks=True,
    ),
    "profile": Command(
        ".runtime.commands.speed.profile",
        "run",
        "show where the time goes, by kernel and by layer",
        "iqforge profile -m model-iq4_k.gguf -o profile.svg",
        ranks=True,
    ),
    "demo": Command(
        ".demo.command",
        "run",
        "run everything on a small model that is included",
        "iqforge demo",
    ),
    "inspect": Command(
        ".formats.commands.inspect",
        "inspect",
        "show keys, tensors, types and sizes of a GGUF file",
        "iqforge inspect model-iq4_k.gguf",
    ),
    "gguf-hash": Command(
        ".formats.commands.gguf_hash",
        "inspect",
        "hash the tensors of a GGUF file, or check their hashes",
        "iqforge gguf-hash --sha256 model-iq4_k.gguf",
    ),
    "types": Command(
        ".formats.commands.types",
        "inspect",
        "list the types that tensors can have",
        "iqforge types",
    ),
    "kernels": Command(
        ".cuda_kernels.command",
        "advanced",
        "list the CUDA kernels, or compile them ahead of time",
        "iqforge kernels --build --arch sm_90",
    ),
    "warmup": Command(
        ".quantize.commands.warmup",
        "advanced",
        "compile the searches of types ahead of time",
        "iqforge warmup IQ4_K Q6_K",
    ),
    "quantize-bench": Command(
        ".quantize.commands.quantize_bench",
        "advanced",
        "measure the speed and error of quantizing to each type",
        "iqforge quantize-bench --type IQ4_K",
    ),
}
