// xIELU (Huang and Schlag, 2024): alpha_p x^2 + beta x above 0, alpha_n (exp(min(x, eps)) - 1 - x) + beta x elsewhere, eps below 0.
#pragma once

struct Xielu {
  float alpha_p, alpha_n, beta, eps;
};

static __device__ __forceinline__ float xielu(float x, const Xielu& by) {
  return (x > 0.0f ? by.alpha_p * x * x : by.alpha_n * (expm1f(x < by.eps ? x : by.eps) - x)) + by.beta * x;
}
