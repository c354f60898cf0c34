"""Boxes and axes of the chart: values to pixels, and round numbers for ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMALLEST = 1e-7  # drawn in place of zero


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels; y grows downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Return whether the two overlap."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        """Return whether `other` is inside, edges included."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def grown(self, margin: float) -> Box:
        """Return the box with `margin` pixels more on every side."""
        return Box(self.left - margin, self.top - margin, self.right + margin, self.bottom + margin)

    def svg(self, kind: str) -> str:
        """Return an SVG rectangle with round corners of the class `kind`."""
        return (
            f'<rect class="{kind}" x="{self.left:.1f}" y="{self.top:.1f}"'
            f' width="{self.right - self.left:.1f}" height="{self.bottom - self.top:.1f}" rx="4"/>'
        )


@dataclass(frozen=True)
class Axes:
    """Maps values to pixels inside `frame`."""

    frame: Box
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        """Return the pixel of a value on the linear axis."""
        return self.frame.left + (value - self.x_low) / (self.x_high - self.x_low) * (
            self.frame.right - self.frame.left
        )

    def y(self, value: float) -> float:
        """Return the pixel of a value on the logarithmic axis; values below SMALLEST are drawn
        there.
        """
        share = math.log(max(value, SMALLEST) / self.y_low) / math.log(self.y_high / self.y_low)
        return self.frame.bottom - share * (self.frame.bottom - self.frame.top)

    def around(self, x: float, y: float) -> Box:
        """Return the box of a mark at these values."""
        return Box(self.x(x), self.y(y), self.x(x), self.y(y)).grown(9)

    @property
    def x_ticks(self) -> list[float]:
        """Return about eight round values, 1, 2 or 5 times a power of ten apart."""
        step = one_two_five((self.x_high - self.x_low) / 8, up=True)
        return [
            i * step
            for i in range(
                math.ceil(self.x_low / step - 1e-6), math.floor(self.x_high / step + 1e-6) + 1
            )
        ]

    @property
    def y_ticks(self) -> list[float]:
        """Return 1, 2 and 5 times powers of ten, on a short axis all digits."""
        powers = range(math.floor(math.log10(self.y_low)), math.ceil(math.log10(self.y_high)) + 1)
        digits = (1, 2, 5) if self.y_high > 5 * self.y_low else range(1, 10)
        return [
            d * 10.0**p
            for p in powers
            for d in digits
            if self.y_low * 0.999 <= d * 10.0**p <= self.y_high * 1.001
        ]


def one_two_five(value: float, up: bool) -> float:
    """Return the nearest 1, 2 or 5 times a power of ten that is not below (`up`) or not above
    `value`.
    """
    power = 10.0 ** math.floor(math.log10(value))
    steps = [digit * power for digit in (1, 2, 5, 10)]
    return next(s for s in steps if s >= value) if up else max(s for s in steps if s <= value)
