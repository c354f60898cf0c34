"""Results as lines of text, in the reference's words and columns, so that scripts written for it
keep working.
"""

from __future__ import annotations

from .divergence import Divergence, Statistics
from .perplexity import Perplexity, RunningScore
from .tasks import TaskItem, TaskScore

TABLE_HEADER = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence"
    "              Δp RMS            Same top p"
)
LEAST_FOR_SUMMARY = 100  # scored tokens, or tasks
_FRACTIONS = {
    "99.9%": 0.999,
    "99.0%": 0.99,
    "95.0%": 0.95,
    "90.0%": 0.9,
    "75.0%": 0.75,
    "Median ": 0.5,
    "25.0%": 0.25,
    "10.0%": 0.1,
    " 5.0%": 0.05,
    " 1.0%": 0.01,
    " 0.1%": 0.001,
}
_NOT_FOR_KLD = ("75.0%", "25.0%")


def final_estimate(result: Perplexity) -> str:
    """Return the reference's last line: perplexity and uncertainty, or its words for having
    none.
    """
    if result.running and not result.running[-1].nll_error > 0:
        return "Unexpected negative standard deviation of log(prob)"
    return f"Final estimate: PPL = {result.perplexity:.4f} +/- {result.uncertainty:.5f}"


def running_line(score: RunningScore) -> str:
    """One line per chunk: start token, perplexity, mean negative log-likelihood, its standard
    error.
    """
    return f"{score.start:8d}  {score.perplexity:.4f}  {score.mean_nll:4f}  {score.nll_error:4f}"


def strided_line(score: RunningScore) -> str:
    """One line per window: start token, perplexity."""
    return f"{score.start:8d}  {score.perplexity:.4f}"


def text_line(name: str, result: Perplexity) -> str:
    """One line per text, where there are several."""
    return (
        f"{name}: PPL = {result.perplexity:.4f} +/- {result.uncertainty:.5f} over"
        f" {result.n_chunks} chunk{'s' * (result.n_chunks != 1)}"
    )


def divergence_line(name: str, result: Divergence) -> str:
    """One line per text, where there are several."""
    s = result.statistics
    (ppl, ppl_error), (base, base_error), (kld, error) = s.ppl, s.ppl_base, s.mean_kld
    return (
        f"{name}: PPL = {ppl:.4f} +/- {ppl_error:.5f}, PPL(base) = {base:.4f} +/-"
        f" {base_error:.5f}, KLD = {kld:.6f} +/- {error:.6f}, 99% KLD ="
        f" {s.kld_quantiles(0.99)[0]:.6f}, same top p = {100 * s.same_top[0]:.3f} %"
    )


TASK_HEADER = "\ntask\tacc_norm"


def choice_line(index: int, item: TaskItem) -> str:
    """Number and accuracy in percent so far, of HellaSwag and multiple choice."""
    return f"{index + 1}\t{100 * item.accuracy:.8f}"


def winogrande_line(index: int, item: TaskItem) -> str:
    """Number, accuracy in percent so far, scores, chosen and right answer."""
    one, two = item.scores
    chosen = item.chosen + 1
    right = chosen if item.is_right else 3 - chosen
    return f"{index + 1}\t{100 * item.accuracy:.4f}\t{one:10.6f}  {two:10.6f}  {chosen}  {right}"


def task_summary(kind: str, score: TaskScore) -> list[str]:
    """The lines after those of the tasks."""
    n, accuracy = len(score.items), f"{100 * score.accuracy:.4f} +/- {100 * score.error:.4f}"
    if kind == "winogrande":
        enough = n >= LEAST_FOR_SUMMARY
        return ["", f"Final Winogrande score({n} tasks): {accuracy}"] if enough else []
    if kind == "multiple-choice":
        chance, error = score.random_chance
        return [
            "",
            f" Final result: {accuracy}",
            f"Random chance: {100 * chance:.4f} +/- {100 * error:.4f}",
        ]
    return []


def table_row(chunk: int, s: Statistics) -> str:
    """Cumulative values after chunk number `chunk` (from 0)."""
    (ppl, ppl_error), (ratio, ratio_error), (kld, kld_error) = s.ppl, s.log_ratio, s.mean_kld
    (rms, rms_error), (same, same_error) = s.rms_delta_p, s.same_top
    return (
        f"{chunk + 1:4d}   {ppl:10.4f} ± {ppl_error:9.4f}    {ratio:10.5f} ± {ratio_error:10.5f}  "
        f"  {kld:10.5f} ± {kld_error:10.5f}    {100 * rms:6.3f} ± {100 * rms_error:6.3f} %   "
        f" {100 * same:6.3f} ± {100 * same_error:6.3f} %"
    )


def summary(s: Statistics) -> list[str]:
    """The final blocks."""

    def with_error(pair: tuple[float, float]) -> str:
        return f"{pair[0]:10.6f} ± {pair[1]:10.6f}"

    lines = [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {with_error(s.ppl)}",
        f"Mean PPL(base)                : {with_error(s.ppl_base)}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * s.correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {with_error(s.log_ratio)}",
        f"Mean PPL(Q)/PPL(base)         : {with_error(s.ratio)}",
        f"Mean PPL(Q)-PPL(base)         : {with_error(s.difference)}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {with_error(s.mean_kld)}",
        f"Maximum KLD: {s.kld_quantiles(1)[0]:10.6f}",
    ]
    labels = [label for label in _FRACTIONS if label not in _NOT_FOR_KLD]
    values = s.kld_quantiles(*(_FRACTIONS[label] for label in labels))
    lines += [f"{label:7} KLD: {value:10.6f}" for label, value in zip(labels, values, strict=True)]
    lines.append(f"Minimum KLD: {s.kld_quantiles(0)[0]:10.6f}")
    if s.kld_bounds is not None:
        least, error = s.kld_bounds
        lines.append(
            f"Compact base: the mean is an estimate ± {error:.6f}, and at least {least:.6f}"
        )
    lines += [
        "",
        "====== Token probability statistics ======",
    ]
    mean, mean_error = s.mean_delta_p
    lines += [
        f"Mean    Δp: {100 * mean:6.3f} ± {100 * mean_error:5.3f} %",
        f"Maximum Δp: {100 * s.delta_p_quantiles(1)[0]:6.3f}%",
    ]
    values = s.delta_p_quantiles(*_FRACTIONS.values())
    lines += [
        f"{label:7} Δp: {100 * value:6.3f}%"
        for label, value in zip(_FRACTIONS, values, strict=True)
    ]
    (rms, rms_error), (same, same_error) = s.rms_delta_p, s.same_top
    return lines + [
        f"Minimum Δp: {100 * s.delta_p_quantiles(0)[0]:6.3f}%",
        f"RMS Δp    : {100 * rms:6.3f} ± {100 * rms_error:5.3f} %",
        f"Same top p: {100 * same:6.3f} ± {100 * same_error:5.3f} %",
    ]
