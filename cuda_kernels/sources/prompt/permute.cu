// Rows of activations with the columns of each 128 permuted, as grouped.cu and few.cu read them, filled up with zeros to whole groups.
#include "units/common.cuh"
#include "prompt/overlap.cuh"

// A thread takes 8 columns of each of the four units of a group; the pairs n of all four become sixteen bytes. x half[rows, cols], its rows
// `stride` apart; out [rows, groups of 128]. Grid: one thread for each quarter of a group.
extern "C" __global__ void permute_rows(const uint16_t* x, int rows, int cols, int stride, uint4* out) {
  follow_launch_before();
  const int groups = (cols + 127) / 128, i = blockIdx.x * blockDim.x + threadIdx.x, row = i / (4 * groups), c = i % 4, group = i / 4 % groups;
  if (row >= rows) return;
  const int column = 128 * group + 8 * c;
  uint4 v[4];
#pragma unroll
  for (int q = 0; q < 4; ++q)
    v[q] = column + 32 * q < cols ? *reinterpret_cast<const uint4*>(x + int64_t(row) * stride + column + 32 * q) : make_uint4(0, 0, 0, 0);
  uint4* to = out + int64_t(row) * groups * 16 + 16 * group + 4 * c;
  to[0] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
  to[1] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
  to[2] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
  to[3] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
}
