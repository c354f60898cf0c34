"""Random models of the cases in `tiny_cases`, and transformers' logits. The same weights are drawn
in every run, unless a test asks for those of the run's seed.
"""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from .seed import VARIABLE
from .tiny_cases import N_TOKENS, Case, Sizes
from .tiny_checkpoint import write_tokenizer

# A draw counts as ambiguous if weights that differ in the last bits give other logits: a router or
# an indexer then chooses between equals, and no two implementations need to agree. Logits that
# change by less than STABLE times the relative disturbance are the same choices.
DISTURBANCE, STABLE = 2e-6, 100
HALF = 1e-3  # twice what rounding to half precision changes
TRIES = 60  # models, until one is drawn whose choices are clear


@dataclass(frozen=True, repr=False)
class TinyModel:
    """A checkpoint with token ids and transformers' logits float32[n, vocabulary]."""

    case: Case
    sizes: Sizes
    folder: Path
    of_run: int
    seed: int
    tokens: list[int]
    logits: np.ndarray

    def __repr__(self) -> str:
        return (
            f"{self.case.name} {self.sizes.name} ({self.case.hf_class}), drawn from seed"
            f" {self.seed}; repeat with {VARIABLE}={self.of_run}"
        )


def make_tiny_model(
    case: Case, sizes: Sizes, folder: Path, disturbance: float = DISTURBANCE, of_run: int = 1
) -> TinyModel:
    """Write a checkpoint of random weights to `folder` and compute its logits. One that is the same
    in every run is drawn once per process, and copied.

    disturbance: a relative change of weights that changes no choice of experts: HALF for a
    comparison with half precision. of_run: the seed of the run, for a test that is to see other
    weights in every run.
    """
    if of_run != 1:
        return _draw(case, sizes, folder, disturbance, of_run)
    drawn = _drawn(case, sizes, disturbance)
    shutil.copytree(drawn.folder, folder, dirs_exist_ok=True)
    return replace(drawn, folder=folder, tokens=[*drawn.tokens], logits=drawn.logits.copy())


@functools.cache
def _drawn(case: Case, sizes: Sizes, disturbance: float) -> TinyModel:
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return _draw(case, sizes, Path(folder.name), disturbance, 1)


def _draw(case: Case, sizes: Sizes, folder: Path, disturbance: float, of_run: int) -> TinyModel:
    model_class = _class_of(case)
    config = model_class.config_class(**case.config(sizes))
    for part in (config, config.get_text_config()):
        part._attn_implementation = part._experts_implementation = "eager"
    base = int(np.random.SeedSequence([of_run, *case.name.encode()]).generate_state(1)[0])
    for seed in range(base, base + TRIES):
        random = torch.Generator().manual_seed(seed)
        model = model_class(config).float().eval()
        _randomize(model, random, case)
        tokens = torch.randint(2, 300, (N_TOKENS,), generator=random)
        logits = _logits(model, tokens)
        if _is_stable(model, tokens, logits, random, disturbance):
            break
    else:
        raise AssertionError(f"no stable draw for {case.name}: choose other sizes")
    model.save_pretrained(folder)
    if case.renamed is not None:
        _rename(folder / "model.safetensors", *case.renamed)
    write_tokenizer(folder)
    return TinyModel(case, sizes, folder, of_run, seed, tokens.tolist(), logits.numpy())


def _class_of(case: Case):
    """Return the model class of transformers, or the one here of a model that has its own code."""
    import transformers

    from . import (
        bailing_reference,
        deepseek_reference,
        hy_v4_reference,
        internlm2_reference,
        minicpm_reference,
        step35_reference,
    )

    transformers.utils.logging.disable_progress_bar()
    own = (
        bailing_reference,
        deepseek_reference,
        hy_v4_reference,
        internlm2_reference,
        minicpm_reference,
        step35_reference,
    )
    for module in own:
        if hasattr(module, case.hf_class):
            return getattr(module, case.hf_class)
    return getattr(transformers, case.hf_class)


def _rename(path: Path, old: str, new: str) -> None:
    from safetensors.torch import load_file, save_file

    save_file({name.replace(old, new): tensor for name, tensor in load_file(path).items()}, path)


@torch.no_grad()
def _logits(model, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens[None], use_cache=False).logits[0].float()


@torch.no_grad()
def _is_stable(
    model, tokens: torch.Tensor, logits: torch.Tensor, random, disturbance: float
) -> bool:
    """Whether disturbances as large as rounding leave the logits as they are. The weights are the
    original ones afterwards.
    """
    kept = {name: p.clone() for name, p in model.named_parameters()}
    largest = 0.0
    for _ in range(
        2 if disturbance == DISTURBANCE else 8
    ):  # close choices are more frequent in half precision
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=random)
            p.copy_(kept[name] * (1 + disturbance * noise))
        largest = max(largest, float((_logits(model, tokens) - logits).abs().max()))
        if largest >= STABLE * disturbance:
            break
    for name, p in model.named_parameters():
        p.copy_(kept[name])
    return largest < STABLE * disturbance


@torch.no_grad()
def _randomize(model, random: torch.Generator, case: Case) -> None:
    persistent, tied = set(model.state_dict()), model.config.get_text_config().tie_word_embeddings
    tensors = dict(model.named_parameters())
    tensors |= {name: b for name, b in model.named_buffers() if name in persistent}
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):  # different experts for every token
            scores = torch.rand(len(tensor), model.config.n_routed_experts, generator=random)
            tensor.copy_(scores.argsort(dim=1)[:, : tensor.shape[1]])
        elif tensor.is_floating_point():  # what hashes n-grams stays as it is
            tensor.copy_(_values(name, tensor, random, case, tied))


def _values(
    name: str, old: torch.Tensor, random: torch.Generator, case: Case, tied: bool
) -> torch.Tensor:
    normal = torch.randn(old.shape, generator=random)
    last = name.rpartition(".")[2]
    # In a delta net, the output of a head that remembers one token is q.k v, and the norm after it
    # makes a jump of the zero of q.k. So memories fade slowly, and what SiLU makes of the large
    # values after the convolution is mostly positive.
    if last == "A_log":
        return torch.rand(old.shape, generator=random).mul(2).add(0.05).log()
    if last == "dt_bias":
        return torch.rand(old.shape, generator=random).mul(4).sub(5)
    if last == "e_score_correction_bias":
        return 0.3 * normal
    if last == "sinks":
        return normal
    if last.endswith("bias"):
        return 0.2 * normal
    if old.ndim < 2:  # norms and scales, around 1, or around 0 where the model adds 1
        # Gemma 3n and 4 do not divide scores by the head size; their norms of queries and keys are
        # small.
        small = case.architecture in ("gemma3n", "gemma4") and name.endswith(
            ("q_norm.weight", "k_norm.weight")
        )
        return (0.3 if small else 1) * (old.float().round().clamp(0, 1) + 0.25 * normal)
    if last == "weight" and name.endswith("conv1d.weight"):
        return 1.5 * normal
    if "embed_tokens" in name or "word_embeddings" in name:
        return (1 / math.sqrt(old.shape[-1]) if tied else 0.5) * normal
    fan_in = old.shape[-2] if case.hf_class == "GptOssForCausalLM" and old.ndim == 3 else None
    gain = 1.5 if name.endswith(("gate.weight", "router.weight", "router.proj.weight")) else 0.9
    return gain / math.sqrt(fan_in or old.shape[-1]) * normal
