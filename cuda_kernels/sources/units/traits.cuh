// What a unit says of itself, and a default where it says nothing: see common.cuh.
#pragma once

template <class T, class = void>
struct UnitFactor { static constexpr float value = 1.0f; };
template <class T>
struct UnitFactor<T, decltype(void(T::FACTOR))> { static constexpr float value = T::FACTOR; };

template <class T, class = void>
struct UnitOwn { static constexpr bool value = false; };
template <class T>
struct UnitOwn<T, decltype(void(T::OWN))> { static constexpr bool value = T::OWN; };

// What is said of products, see above.
template <class T, class = void>
struct UnitLess { static constexpr int value = 0; };
template <class T>
struct UnitLess<T, decltype(void(T::LESS))> { static constexpr int value = T::LESS; };

template <class T, class = void>
struct UnitSecond { static constexpr int value = 0; };
template <class T>
struct UnitSecond<T, decltype(void(T::SECOND))> { static constexpr int value = T::SECOND; };

template <class T, class = void>
struct UnitParts { static constexpr int value = 1; };
template <class T>
struct UnitParts<T, decltype(void(T::PARTS))> { static constexpr int value = T::PARTS; };

template <class T, class = void>
struct UnitWhole { static constexpr float lacking = 1.0f; };
template <class T>
struct UnitWhole<T, decltype(void(T::WHOLE))> { static constexpr float lacking = T::WHOLE; };

template <class T, class = void>
struct UnitSpread { static constexpr int value = 0; };
template <class T>
struct UnitSpread<T, decltype(void(T::SPREAD))> { static constexpr int value = T::SPREAD; };

template <class T, class = void>
struct UnitHeader { static constexpr bool value = false; static constexpr int bytes = 0; };
template <class T>
struct UnitHeader<T, decltype(void(T::HEADER_PLANE))> { static constexpr bool value = true; static constexpr int bytes = T::HEADER_BYTES; };

template <class T, class = void>
struct UnitFloats { static constexpr bool value = false; };
template <class T>
struct UnitFloats<T, decltype(void(T::FLOATS))> { static constexpr bool value = T::FLOATS; };

template <class T, class = void>
struct UnitBfloats { static constexpr bool value = false; };
template <class T>
struct UnitBfloats<T, decltype(void(&T::bfloats))> { static constexpr bool value = true; };

template <class T, class = void>
struct UnitSixteen { static constexpr bool value = false; };
template <class T>
struct UnitSixteen<T, decltype(void(sizeof(typename T::Sixteen)))> { static constexpr bool value = true; };

template <class T, class = void>
struct UnitShared { static __device__ __forceinline__ void prepare(int, int) {} };
template <class T>
struct UnitShared<T, decltype(void(sizeof(typename T::Shared)))> {
  static __device__ __forceinline__ void prepare(int thread, int threads) {
    T::Shared::prepare(thread, threads);
    __syncthreads();
  }
};
