"""A comparison as lines of text, and the words that its page and a model card share."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import printable
from ..runtime.evaluate.comparison import Comparison, Difference, ModelFigures, TextFigures

_SHOWN = 3  # tokens that differ most, per model


def size_of(n_bytes: int) -> str:
    """Return a size as in `12.34 GB`, in powers of ten."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.2f} {unit}"
    return f"{n_bytes} B"


def pair(value: tuple[float, float], digits: int) -> str:
    """Return a value and its uncertainty as `1.23 ± 0.04`, with `digits` decimals."""
    return f"{value[0]:.{digits}f} ± {value[1]:.{digits}f}"


def speed(value: float | None) -> str:
    """Return tokens per second with three digits."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def best_of(comparison: Comparison) -> ModelFigures:
    """Return the model with the least mean divergence on the first text."""
    return min(comparison.models, key=lambda model: kld(model.texts[0])[0])


def kld(text: TextFigures) -> tuple[float, float]:
    """Return the mean divergence of a model that is not the base."""
    return text.kld or (0.0, 0.0)


def text_table(comparison: Comparison, *, differences: bool = True) -> str:
    """Return a table of the models, one for each text, and the tokens that differ most."""
    everything = [comparison.base, *comparison.models]
    width = max(5, *(len(printable(model.name, 60)) for model in everything))
    first = comparison.base
    head = f"{'model':<{width}} {'size':>10} {'bpw':>6} {'memory':>10}"
    head += f" {f'pp{first.n_prompt or str()} t/s':>11} {'tg t/s':>8}"
    lines = [head]
    for model in everything:
        lines.append(
            f"{printable(model.name, 60):<{width}} {size_of(model.file_bytes):>10}"
            f" {model.bits_per_weight:6.2f} {size_of(model.memory):>10} {speed(model.prompt):>11}"
            f" {speed(model.generation):>8}"
        )
    for index, text in enumerate(first.texts):
        lines += ["", f"{printable(text.text, 400)}: {text.n_tokens} tokens scored"]
        lines.append(
            f"{'model':<{width}} {'PPL':>18} {'mean KLD':>20} {'median':>9} {'99%':>9} {'99.9%':>9}"
            f" {'max':>9} {'same top':>9}"
        )
        for model in everything:
            lines.append(f"{printable(model.name, 60):<{width}} {_line(model.texts[index])}")
    if differences:
        for model in comparison.models:
            lines += _differences(model)
    return "\n".join(lines)


def _line(text: TextFigures) -> str:
    line = f"{pair(text.perplexity, 4):>18}"
    if text.kld is None or text.same_top is None:
        return line + f" {'-':>20}" + f" {'-':>9}" * 5
    values = "".join(f" {text.quantile(f):9.5f}" for f in (0.5, 0.99, 0.999, 1.0))
    return f"{line} {pair(text.kld, 6):>20}{values} {100 * text.same_top[0]:7.2f} %"


def _differences(model: ModelFigures) -> list[str]:
    lines = []
    for text in model.texts:
        for one in text.differences[:_SHOWN]:
            lines.append(f"  {one.divergence:7.3f}  {_shown(one)}")
    name = printable(model.name, 60)
    return ["", f"{name}: where its predictions differ most", *lines] if lines else []


def _shown(one: Difference) -> str:
    def best(predictions: Sequence) -> str:
        return ", ".join(f"{p.text!r} {100 * p.probability:.0f} %" for p in predictions[:2])

    context = printable(" ".join(one.context.split())[-50:], 60)
    return (
        f"...{context} | {one.target!r} follows; base: {best(one.base)}; model: {best(one.model)}"
    )
