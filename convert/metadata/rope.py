"""Rotary embedding settings of config.json, as transformers spells them before and since
version 5.
"""

from __future__ import annotations

import json
import math

import numpy as np

from ...errors import ConfigError, printable
from ...formats.values import Value, f32, string, u32
from ..checkpoint.config import Config

# GGUF key under `rope.scaling.` <- key of the section, for YaRN
_YARN_KEYS = (
    ("yarn_ext_factor", "extrapolation_factor"),
    ("yarn_attn_factor", "attention_factor"),
    ("yarn_beta_fast", "beta_fast"),
    ("yarn_beta_slow", "beta_slow"),
)


class RopeConfig:
    """`rope_parameters` (transformers 5), or `rope_theta` with `rope_scaling` (before). `kind` is
    one of `kinds`.

    `layers` names the section of `rope_parameters` to read where layers differ, such as
    `full_attention`.
    """

    kinds: tuple[str, ...] = ("default", "linear", "llama3", "yarn")
    # Models compute frequencies and factors in single precision. Files agree with those of the
    # reference in every bit if factors are computed as there.
    factor_type: type[np.floating] = np.float32

    def __init__(self, config: Config, head_size: int, layers: str | None = None):
        self._config, self._head_size = config, head_size
        section = config.section("rope_parameters")
        if section is not None and layers is not None and layers in section:
            section = section.section(layers)
        elif section is not None:
            _refuse_others(section, config)
        self._section = section or config.section("rope_scaling")
        self.kind = (
            "default"
            if self._section is None
            else self._section.string("rope_type", "type", default="default")
        )
        if self.kind not in self.kinds:
            raise ConfigError(
                f"rope type '{printable(self.kind)}' is not supported for this architecture;"
                f" {', '.join(self.kinds)} are",
                file=config.file,
            )
        if head_size % 2:
            raise ConfigError(
                f"head size {head_size} is odd; rotary embedding needs pairs", file=config.file
            )

    def base(self) -> float:
        """Return the base of the rotary frequencies, 10000 if the config lacks it."""
        if self._section is not None and "rope_theta" in self._section:
            return self._section.number("rope_theta")
        # The default of the model classes; configs before 2023 lack the key.
        return self._config.number("rope_theta", default=10000.0)

    def context(self) -> int:
        """Return the longest text in tokens. Raise ConfigError if the config lacks it."""
        return self._config.integer("max_position_embeddings")

    def rotated(self) -> int:
        """Return how many elements of a head are rotated: all, or the share
        `partial_rotary_factor` of them.
        """
        sections = [
            section
            for section in (self._config.section("rope_parameters"), self._config)
            if section is not None
        ]
        found = next((section for section in sections if "partial_rotary_factor" in section), None)
        return self._head_size if found is None else share_of_head(found, self._head_size)

    def scaling_keys(self) -> dict[str, Value]:
        """Return `rope.scaling.*`; none for llama3, whose scaling is a tensor of factors."""
        section = self._section
        if section is None or self.kind in ("default", "llama3"):
            return {}
        keys = {"type": string(self.kind), "factor": f32(section.number("factor"))}
        if self.kind == "yarn":
            original = section.integer("original_max_position_embeddings", default=None)
            keys["original_context_length"] = u32(
                original or self._config.integer("max_position_embeddings")
            )
            keys |= {
                key: f32(section.number(stored)) for key, stored in _YARN_KEYS if stored in section
            }
        return {f"rope.scaling.{key}": value for key, value in keys.items()}

    def factors(self) -> np.ndarray | None:
        """Return the divisors of the rotary frequencies for llama3 scaling, float32[head_size / 2];
        None for other kinds.

        With f_i = base^(-2i/d) and wavelength w = 2 pi / f_i: 1 where w < original / high, `factor`
        where w > original / low, and between them 1 / ((1 - s) / factor + s) with s = (original / w
        - low) / (high - low). Where both factors are equal, as in Llama 4 Scout, nothing is between
        them. Raise ConfigError if the high factor is below the low one.
        """
        section = self._section
        if section is None or self.kind != "llama3":
            return None
        factor, low, high = (
            section.number("factor"),
            section.number("low_freq_factor"),
            section.number("high_freq_factor"),
        )
        original = section.integer("original_max_position_embeddings")
        if high < low:
            raise ConfigError(
                f"high_freq_factor {high} is below low_freq_factor {low}", file=self._config.file
            )
        exponents = np.arange(0, self._head_size, 2, dtype=np.float32) / np.float32(self._head_size)
        rates = np.float32(1) / np.float32(self.base()) ** exponents
        real = self.factor_type
        one, wavelengths = real(1), real(2 * np.pi) / rates.astype(real)
        above = real(original) / wavelengths - real(low)
        smooth = (
            (above >= 0).astype(real) if high == low else np.clip(above / real(high - low), 0, 1)
        )
        return (one / ((one - smooth) / real(factor) + smooth)).astype(np.float32)


def _refuse_others(section: Config, config: Config) -> None:
    """Raise ConfigError if a config with `rope_parameters` also has a `rope_scaling` that says
    something else, as where users add YaRN to a checkpoint: programs differ in which one they read.
    """
    older = config.section("rope_scaling")
    if older is None:
        return
    for key, value in older.values.items():
        own = "rope_type" if key == "type" else key
        found = section.values.get(own, "default" if own == "rope_type" else None)
        if value is not None and value != found:
            raise ConfigError(
                f"'rope_scaling' and 'rope_parameters' differ: '{printable(key)}' is"
                f" {printable(json.dumps(value))} and {printable(json.dumps(found))}; put what"
                " holds into 'rope_parameters', and delete 'rope_scaling'",
                file=config.file,
            )


class PlainRopeConfig(RopeConfig):
    """Without Llama 3's factors, for architectures in which runtimes do not apply them."""

    kinds = ("default", "linear", "yarn")


class UnscaledRopeConfig(RopeConfig):
    """Without scaling, but for Llama 3's factors."""

    kinds = ("default", "llama3")


class DefaultRopeConfig(RopeConfig):
    """Without any scaling."""

    kinds = ("default",)


class FixedRopeConfig(RopeConfig):
    """InternLM2's: `dynamic` scaling, which changes frequencies in texts beyond the context, has no
    keys, as in the reference's files.
    """

    kinds = ("default", "linear", "dynamic")

    def scaling_keys(self) -> dict[str, Value]:
        return {} if self.kind == "dynamic" else super().scaling_keys()


class FirstHalfRopeConfig(RopeConfig):
    """Step 3.5's: half of a head is rotated, and scaled, in layers without a window; the whole
    head, without scaling, in others. base: of layers without a window.
    """

    kinds = ("default", "llama3")
    factor_type = np.float64

    def __init__(self, config: Config, head_size: int, base: float):
        super().__init__(config, head_size // 2)
        self._base = base

    def base(self) -> float:
        return self._base

    def factors(self) -> np.ndarray | None:
        """Return the divisors, float32[head_size / 2], of which layers without a window use the
        first half, and others none.
        """
        factors = super().factors()
        return None if factors is None else np.concatenate([factors, np.ones_like(factors)])


class LongRopeConfig(RopeConfig):
    """Phi-3's `longrope` (formerly `su`): two sets of frequency factors, for texts within the
    original context and longer ones.
    """

    kinds = ("default", "longrope", "su")

    def original_context(self) -> int:
        """Return the context in tokens that short factors are for, 4096 if the config lacks it."""
        for config in (self._section, self._config):
            if config is not None and "original_max_position_embeddings" in config:
                return config.integer("original_max_position_embeddings")
        return 4096  # the default of the model class

    def scaling_keys(self) -> dict[str, Value]:
        """Return the original context length c and the attention factor sqrt(1 + ln s / ln c), with
        s the ratio of the whole context to the original one.
        """
        original = self.original_context()
        keys = {"rope.scaling.original_context_length": u32(original)}
        if self.kind != "default":
            scale = self._config.integer("max_position_embeddings") / original
            factor = (
                math.sqrt(1 + math.log(scale) / math.log(original))
                if scale > 1 and original > 1
                else 1.0
            )
            keys["rope.scaling.attn_factor"] = f32(factor)
        return keys

    def both_factors(self) -> dict[str, np.ndarray]:
        """Return the factors `long` and `short`, each float32[rotated dimensions / 2]; none without
        scaling.
        """
        section = self._section
        if section is None or self.kind == "default":
            return {}
        return {
            which: np.array(
                section.numbers(f"{which}_factor", length=self._head_size // 2), np.float32
            )
            for which in ("long", "short")
        }


class ProportionalRopeConfig(RopeConfig):
    """Gemma 4's: frequencies as for whole heads, but only `partial_rotary_factor` of the pairs,
    those with the highest frequencies, are rotated.
    """

    kinds = ("default", "proportional")
    _NOT_ROTATED = 1e30  # a divisor of a frequency that leaves no rotation

    def scaling_keys(self) -> dict[str, Value]:
        return {}

    def factors(self) -> np.ndarray:
        partial = (
            1.0
            if self._section is None
            else self._section.number("partial_rotary_factor", default=1.0)
        )
        factors = np.full(self._head_size // 2, self._NOT_ROTATED, np.float32)
        factors[: int(partial * self._head_size / 2)] = 1
        return factors


class AlphaRopeConfig(RopeConfig):
    """Hunyuan's `dynamic`: the base is stretched by a fixed `alpha`, whatever the length of texts.

    Its configs name the context before that, 32k; models are made for 256k.
    """

    kinds = (*RopeConfig.kinds, "dynamic")
    _NAMED, _WHOLE = 32 * 1024, 256 * 1024

    def base(self) -> float:
        """Return the base times alpha^(d / (d - 2)), d the head size. Raise ConfigError without
        `alpha`, whose lack means that frequencies change with the length of a text.
        """
        base, size = super().base(), self._head_size
        if self.kind != "dynamic" or self._section is None:
            return base
        alpha = self._section.number("alpha")
        try:
            return base * alpha ** (size / (size - 2))
        except (OverflowError, ZeroDivisionError):
            raise ConfigError(
                f"alpha {alpha:g} gives no base of rotary frequencies for heads of {size}",
                file=self._config.file,
            ) from None

    def context(self) -> int:
        named = super().context()
        return self._WHOLE if self.kind == "dynamic" and named == self._NAMED else named

    def scaling_keys(self) -> dict[str, Value]:
        if self.kind != "dynamic":
            return super().scaling_keys()
        return {
            "rope.scaling.type": string("none"),
            "rope.scaling.factor": f32(1.0),
            "rope.scaling.original_context_length": u32(self.context()),
        }


def share_of_head(section: Config, head_size: int) -> int:
    """Return how many elements of a head `partial_rotary_factor` says. ConfigError unless they are
    an even number from 2 to all.
    """
    factor = section.number("partial_rotary_factor")
    rotated = int(head_size * factor) if 0 < factor <= 1 else 0
    if rotated < 2 or rotated % 2:
        raise ConfigError(
            f"key 'partial_rotary_factor' is {factor:g}: of heads of {head_size} that is no even"
            f" number from 2 to {head_size}",
            file=section.file,
        )
    return rotated
