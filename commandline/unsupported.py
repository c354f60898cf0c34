"""Flags of llama.cpp and ik_llama.cpp that have no counterpart yet, with their purposes."""

from __future__ import annotations

_FLAGS = {
    "a dialogue without a chat template": "-i --interactive -if --interactive-first --in-prefix"
    " --in-suffix",
    "control vectors": "--control-vector --control-vector-scaled",
    "adaptive sampling": "--adaptive-target --adaptive-decay",
    "thoughts apart from the answer": "--reasoning-format --reasoning-budget",
    "printing the tokens of a prompt, see `iqforge tokenize`": "--verbose-prompt",
    "speculative decoding": "-ctkd --cache-type-k-draft -ctvd --cache-type-v-draft --spec-type"
    " -md --model-draft --draft --draft-max --draft-min -ngld -mtp"
    " --multi-token-prediction -lcs --lookup-cache-static -lcd --lookup-cache-dynamic",
    "images and audio": "--mmproj --image --audio",
    "downloading GGUF files": "-hf -hfr --hf-repo -hff --hf-file -mu --model-url",
    "changing the context by RoPE scaling": "--rope-scaling --rope-scale --rope-freq-base"
    " --rope-freq-scale --yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor -gan -gaw",
    "shifting the context": "--keep --context-shift",
    "saving a state": "--slot-save-path",
    "several sequences": "-np --parallel -ns --sequences -cb --cont-batching",
    "another type for an indexer's keys": "-ictk --idx-type-k",
    "printing the cache": "-dkvc --dump-kv-cache",
    "a log file, redirect stderr": "--log-file",
    "other machines": "--rpc",
    "changing metadata": "--override-kv",
    "checking weights at loading, see `iqforge validate`": "-vq --validate-quants --check-tensors",
}
_CONVERTER_FLAGS = {
    "images and audio": "--mmproj",
    "big-endian files": "--bigendian",
    "the format of Mistral's own checkpoints, convert the one for transformers": "--mistral-format",
    "dense modules of sentence-transformers": "--sentence-transformers-dense-modules",
    "a list of classes, see docs/reference/support.md": "--print-supported-models",
}
UNSUPPORTED = {flag: what for what, flags in _FLAGS.items() for flag in flags.split()}
CONVERTER_UNSUPPORTED = {
    flag: what for what, flags in _CONVERTER_FLAGS.items() for flag in flags.split()
}
