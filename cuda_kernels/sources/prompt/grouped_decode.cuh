// Units of packed weights in registers, as pairs of halves, for grouped.cu and few.cu.
#pragma once

__device__ __forceinline__ uint32_t pair_of(float one, float two) { return HALF ? to_halves(one, two) : to_bfloats(one, two); }

// Pairs of values of a type's table of 16, in bf16, by two codes in a byte; a copy for each lane, all words of which are in its own bank.
static_assert(!LOOKS_UP || (!HALF && UnitSixteen<TYPE>::value), "a type with a table of 16, in bf16");
constexpr int LOOKUP_BYTES = 256 * 128;

template <class TABLE>
__device__ __forceinline__ float table_value(int n) { return float(int8_t(TABLE::word(n / 4) >> (8 * (n % 4)))); }

// A thread stores all copies of a pair, sixteen bytes at a time, and begins with other ones than its neighbours: they are in other banks.
template <class T>
__device__ __forceinline__ void fill_lookup(uint32_t table) {
  for (int codes = threadIdx.x; codes < LOOKUP_BYTES / 128; codes += blockDim.x) {
    const uint32_t pair = to_bfloats(table_value<typename T::Sixteen>(codes % 16), table_value<typename T::Sixteen>(codes / 16));
#pragma unroll
    for (int i = 0; i < 8; ++i)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(table + 128 * codes + (i + codes) % 8 * 16), "r"(pair) : "memory");
  }
}

// Two values in bf16: a * b + c, rounded once.
__device__ __forceinline__ uint32_t fma_bfloats(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

// The values of a unit in pairs, by a table in shared memory at `table`, this lane's copy. The scale is the sum of two numbers in bf16, so that a value is
// rounded once, but for what is 2^-9 of it.
template <class T>
__device__ __forceinline__ void look_up_pairs(const typename T::Raw& raw, int unit, uint32_t table, uint32_t (&pairs)[16]) {
  float s[2], c[2];
  T::terms(raw, unit, s, c);
  const uint4 q = T::codes(raw);
  const uint32_t codes[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
  for (int g = 0; g < T::SCALES; ++g) {
    const uint32_t scale = to_bfloats(s[g], s[g]), more = to_bfloats(c[g] * s[g], c[g] * s[g]);
    const float left = s[g] - __uint_as_float(scale << 16);
    const uint32_t rest = to_bfloats(left, left);
#pragma unroll
    for (int i = 16 / T::SCALES * g; i < 16 / T::SCALES * (g + 1); ++i) {
      uint32_t pair;
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pair) : "r"(byte_times(codes[i / 4], i % 4, 128, table)));
      pairs[i] = fma_bfloats(pair, scale, fma_bfloats(pair, rest, more));
    }
  }
}

// The values of a unit in pairs.
template <class T>
__device__ __forceinline__ void decode_pairs(const typename T::Raw& raw, int unit, uint32_t table, uint32_t (&pairs)[16]) {
  if constexpr (LOOKS_UP) {
    look_up_pairs<T>(raw, unit, table, pairs);
  } else if constexpr (!HALF && UnitBfloats<T>::value) {
    T::bfloats(raw, unit, pairs);
  } else if constexpr (!HALF && !UnitOwn<T>::value) {
    // A byte b is in the middle of the float 2^15 + 128 + b: s * b - m is one operation from there. What is taken off is rounded to a
    // thousandth of s, less than what bf16 rounds off all but the smallest values.
    int w[8];
    float s[2], m[2];
    T::unpack(raw, unit, w, s, m);
#pragma unroll
    for (int g = 0; g < T::SCALES; ++g) {
      if constexpr (UnitFactor<T>::value != 1.0f) s[g] *= UnitFactor<T>::value;
      m[g] = fmaf(-32896.0f, s[g], T::MINS ? -m[g] * UnitFactor<T>::value : 0.0f);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t biased = uint32_t(w[i / 2]) ^ 0x80808080u;
      const int g = T::SCALES == 2 ? i / 8 : 0, byte = 2 * i % 4;
      pairs[i] = pair_of(fmaf(__uint_as_float(__byte_perm(biased, 0x47000000u, 0x7504u | byte << 4)), s[g], m[g]),
                         fmaf(__uint_as_float(__byte_perm(biased, 0x47000000u, 0x7504u | (byte + 1) << 4)), s[g], m[g]));
    }
  } else {
    float v[32];
    decode_unit<T>(raw, unit, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) pairs[i] = pair_of(v[2 * i], v[2 * i + 1]);
  }
}
