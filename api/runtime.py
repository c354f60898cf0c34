"""The roof: what models do, perplexity, text and speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .models import opened_model, text_of
from .source import PathLike

if TYPE_CHECKING:
    import torch

    from ..runtime.bench.bench import Result
    from ..runtime.evaluate.divergence import Divergence
    from ..runtime.evaluate.perplexity import Perplexity
    from ..runtime.model import Model


def measure_perplexity(
    model: PathLike | Model,
    text: PathLike | None,
    *,
    n_ctx: int = 512,
    chunks: int = -1,
    kl_divergence_base: PathLike | None = None,
    kl_divergence: bool = False,
    progress: Any = None,
) -> Perplexity | Divergence:
    """Perplexity of `model` on `text` over windows of n_ctx tokens, at most `chunks` of them if
    that is positive.

    text: a file, or the text itself (a string with a line break in it). kl_divergence_base alone:
    the predictions are also saved there. With kl_divergence: the model is compared with the
    predictions saved in kl_divergence_base, on the text in that file (`text` may be None). The
    results have `.perplexity` and `.uncertainty`, a divergence also `.mean_kld` and `.statistics`.
    """
    from ..formats.output import refuse_same_file
    from ..runtime.evaluate import divergence, perplexity

    with opened_model(model) as loaded:
        if kl_divergence:
            if kl_divergence_base is None:
                raise UsageError("kl_divergence needs kl_divergence_base")
            return divergence.measure_divergence(
                loaded, kl_divergence_base, chunks=chunks, progress=progress
            )
        if text is None:
            raise UsageError("a text is needed")
        content, path = text_of(text)
        if kl_divergence_base is not None and path:
            refuse_same_file(kl_divergence_base, [path])
        return perplexity.measure_perplexity(
            loaded,
            content,
            n_ctx=n_ctx,
            chunks=chunks,
            save_logits=kl_divergence_base,
            progress=progress,
        )


def generate(
    model: PathLike | Model,
    prompt: str | Sequence[int],
    n: int | None = None,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    seed: int = 0,
    context: int = 0,
    ignore_eos: bool = False,
) -> Iterator[str]:
    """Text that follows `prompt` (or its tokens), in pieces as it comes: at most `n` tokens (128,
    if they fit), or until the context is full if n < 0.

    The pieces together are the whole text. temperature 0 takes the most probable token each time;
    the same seed gives the same text. context: most tokens in all, prompt included; 0: as many as
    needed. `runtime.generate.generate_tokens` gives tokens instead.
    """
    from ..runtime.arguments import whole_numbers
    from ..runtime.generate import TextStream, end_tokens, generate_tokens, prompt_tokens
    from ..runtime.sampling import Sampling

    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    with opened_model(model) as loaded:
        tokens = (
            prompt_tokens(loaded.tokenizer, prompt)
            if isinstance(prompt, str)
            else whole_numbers("prompt", prompt)
        )
        stream, end = (
            TextStream(loaded.tokenizer),
            (frozenset() if ignore_eos else end_tokens(loaded)),
        )
        for token in generate_tokens(loaded, tokens, n, sampling, context=context, end=end):
            if piece := stream.feed(token):
                yield piece
        if piece := stream.end():
            yield piece


def decode_torch(
    type: str,
    data: torch.Tensor,
    n_cols: int,
    *,
    as_weights: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`decode` on the device of `data`, uint8[rows, row_bytes]: float32[rows, n_cols] with the same
    bits, or rounded to `dtype`.

    For whole tensors, and I2_S, see `formats.torch_decode.decode_tensor_torch`.
    """
    import torch

    from ..formats.torch_decode import decode_torch as decode

    return decode(type, data, n_cols, as_weights=as_weights, dtype=dtype or torch.float32)


def load_model(path: PathLike, device: str = "cpu", **options: Any) -> Model:
    """Open a GGUF model (plain, split, quantized) for evaluation: `.forward(token_ids)` gives
    logits float32[n, vocab].

    `.tokenizer` has `encode(text)` and `decode(ids)`. See `runtime.model.load_model`.
    """
    from ..runtime.model import load_model as load

    return load(path, device, **options)


def random_model(spec: str, device: str = "cpu", **options: Any) -> Model:
    """A model of random weights, as in `llama-8b:IQ4_K`, that needs no file: for measuring speed.
    `options` as of `runtime.model.Model`.

    It has no tokenizer. See `runtime.synthetic` for shapes and for other types of single tensors.
    """
    from ..runtime.arguments import check_options, instance
    from ..runtime.bench.synthetic import SyntheticSource
    from ..runtime.model import Model

    check_options(**options)
    return Model(SyntheticSource(instance("spec", spec, str, "SHAPE:TYPE")), device, **options)


def benchmark_model(
    model: PathLike | Model,
    *,
    prompts: Sequence[int] = (512,),
    generations: Sequence[int] = (128,),
    depths: Sequence[int] = (0,),
    repetitions: int = 5,
    progress: Any = None,
) -> list[Result]:
    """How fast a model evaluates prompts of `prompts` tokens, and generates `generations` tokens,
    behind `depths` others.

    Results have `.test.label`, `.samples_ts` and `.avg_ts` in tokens/s, `.bytes_per_second` or
    `.flop_per_second`. progress: called with a line of text now and then. See `runtime.bench`.
    """
    from ..runtime.arguments import whole_numbers
    from ..runtime.bench.bench import Test, run_test

    prompts, generations = (
        whole_numbers("prompts", prompts, 1),
        whole_numbers("generations", generations, 1),
    )
    depths = whole_numbers("depths", depths)
    tests = [Test(n_prompt=n, depth=d) for n in prompts for d in depths] + [
        Test(n_gen=n, depth=d) for n in generations for d in depths
    ]
    with opened_model(model) as loaded:
        return [
            run_test(loaded, test, repetitions=repetitions, progress=progress) for test in tests
        ]
