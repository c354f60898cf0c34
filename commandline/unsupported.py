"""Flags of llama.cpp and ik_llama.cpp that have no counterpart yet, with their purposes."""

from __future__ import annotations

_FLAGS = {
    "a dialogue without a chat template": "-i --interactive -if --interactive-first --in-prefix"
    " --in-suffix",
    "control vectors": "--control-vector --control-vector-scaled --control-vector-layer-range",
    "adaptive sampling": "--adaptive-target --adaptive-decay",
    "thoughts apart from the answer": "--reasoning-format --reasoning-budget"
    " --reasoning-budget-message --reasoning-preserve --no-reasoning-preserve",
    "switching thoughts on and off, see --chat-template-kwargs": "-rea --reasoning"
    " --reasoning-effort",
    "printing the tokens of a prompt, see `iqforge tokenize`": "--verbose-prompt",
    "speculative decoding": "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft"
    " -md --model-draft --draft --draft-max --draft-min --draft-p-min -ngld --gpu-layers-draft -mtp"
    " -td --threads-draft -tbd --threads-batch-draft -devd --device-draft -cd --ctx-size-draft"
    " -ps --p-split -draft --draft-params --spec-draft-model --spec-default"
    " --multi-token-prediction -lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
    "images and audio": "-mm --mmproj -mmu --mmproj-url --image --audio --video",
    "downloading GGUF files": "-hf -hfr --hf-repo -hff --hf-file -mu --model-url -dr --docker-repo",
    "a token of the Hub, set HF_TOKEN": "-hft --hf-token",
    "going without the Hub, set HF_HUB_OFFLINE=1": "--offline",
    "a list of devices, see `nvidia-smi -L`": "--list-devices",
    "changing the context by RoPE scaling": "--rope-scaling --rope-scale --rope-freq-base"
    " --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow"
    " --yarn-beta-fast -gan -gaw",
    "saving a state": "--slot-save-path",
    "another type for an indexer's keys": "-ictk --idx-type-k",
    "printing the cache": "-dkvc --dump-kv-cache",
    "a log file, redirect stderr": "--log-file",
    "other machines": "--rpc -rpc",
    "the type of sums between GPUs, see -grt f16": "-smf16 --split-mode-f16",
    "the type of sums between GPUs, see -grt f32": "-smf32 --split-mode-f32",
    "changing metadata": "--override-kv",
    "checking weights at loading, see `iqforge validate`": "-vq --validate-quants --check-tensors",
}
_CONVERTER_FLAGS = {
    "images and audio": "--mmproj",
    "big-endian files": "--bigendian",
    "the format of Mistral's own checkpoints, convert the one for transformers": "--mistral-format",
    "dense modules of sentence-transformers": "--sentence-transformers-dense-modules",
    "the tokenizer of mistral-common": "--disable-mistral-community-chat-template",
    "a list of classes, see docs/reference/support.md": "--print-supported-models",
}
UNSUPPORTED = {flag: what for what, flags in _FLAGS.items() for flag in flags.split()}
CONVERTER_UNSUPPORTED = {
    flag: what for what, flags in _CONVERTER_FLAGS.items() for flag in flags.split()
}
