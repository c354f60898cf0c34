// `solve` of delta.cu: what the chunks need of each other's rows, all chunks at the same time.
#pragma once

constexpr int OF_QUERIES = KEY_PITCH / 2 > VALUE_PITCH ? KEY_PITCH / 2 : VALUE_PITCH;  // floats: queries, then values
constexpr int SOLVE_FLOATS = CHUNK * (KEY_PITCH / 2 + OF_QUERIES + SQUARE_PITCH);

// One block for a chunk of a head: (chunks, sequences * VALUE_HEADS) blocks.
//
// rates float32[sequences * tokens, 2, VALUE_HEADS], the products with the matrices of beta and alpha; dt, a float32[VALUE_HEADS]; q, k and v
// as `heads` leaves them. values and keys, of the shape of v and float16[sequences, VALUE_HEADS, padded, KEY]: T beta V and T beta exp(G) K; qk
// float16[.., chunks, CHUNK, CHUNK]: Q K^T D. since, until float32[sequences, VALUE_HEADS, padded]: exp(G) and exp(G[last] - G).
extern "C" __global__ void __launch_bounds__(THREADS, VALUE > 128 ? 1 : 3)
solve(const float* rates, const float* dt, const float* a, int tokens, const u16* q, const u16* k, const float* v, float* values,
      u16* keys, u16* qk, float* since, float* until) {
    follow_launch_before();
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    __shared__ double total[CHUNK];
    __shared__ float betas[CHUNK], decays[CHUNK];
    u16 *k_here = (u16*)shared, *q_here = k_here + CHUNK * KEY_PITCH;
    float *v_here = (float*)q_here, *square = v_here + CHUNK * OF_QUERIES;
    const int j = threadIdx.x, head = blockIdx.y % VALUE_HEADS, sequence = blockIdx.y / VALUE_HEADS;
    const long long pair = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const long long key_pair = ((long long)sequence * KEY_HEADS + key_head(head)) * gridDim.x + blockIdx.x;
    copy_rows<KEY, THREADS>(k_here, KEY_PITCH, k + key_pair * CHUNK * KEY, CHUNK);
    copy_rows<KEY, THREADS>(q_here, KEY_PITCH, q + key_pair * CHUNK * KEY, CHUNK);
    end_of_copies();
    clear_columns<THREADS>(k_here, KEY_PITCH, CHUNK, KEY, KEYS);
    clear_columns<THREADS>(q_here, KEY_PITCH, CHUNK, KEY, KEYS);
    float beta = 0.f;
    double g = 0.;
    const int token = blockIdx.x * CHUNK + j;
    if (j < CHUNK && token < tokens) {
        const float* rate = rates + ((long long)sequence * tokens + token) * 2 * VALUE_HEADS + head;
        const float x = rate[VALUE_HEADS] + dt[head];
        beta = 1.f / (1.f + expf(-rate[0]));
        g = a[head] * (x > 20.f ? x : log1pf(expf(x)));
    }
    // Sums get large, and only their differences matter.
    if (j < CHUNK) total[j] = g;
    __syncthreads();
#pragma unroll
    for (int d = 1; d < CHUNK; d *= 2) {
        const double before = j >= d && j < CHUNK ? total[j - d] : 0.;
        __syncthreads();
        if (j < CHUNK) total[j] += before;
        __syncthreads();
    }
    if (j < CHUNK) {
        decays[j] = expf((float)total[j]);
        since[pair * CHUNK + j] = decays[j];
        until[pair * CHUNK + j] = expf((float)(total[CHUNK - 1] - total[j]));
        betas[j] = beta;
    }
    wait_for_copies<0>();
    __syncthreads();
    const int warp = j / 32, row = warp % 4 * 16, lane_row = j % 32 / 4, two = j % 4 * 2;
    {
        const int first = warp / 4 * 32;  // columns of this warp
        float of_k[4][4] = {}, of_q[4][4] = {};
        by_fours<4, KEYS>(of_k, k_here + row * KEY_PITCH, KEY_PITCH, k_here + first * KEY_PITCH, KEY_PITCH);
        by_fours<4, KEYS>(of_q, q_here + row * KEY_PITCH, KEY_PITCH, k_here + first * KEY_PITCH, KEY_PITCH);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int r = row + lane_row + e / 2 * 8, c = first + 8 * i + two + e % 2;
                const float between = r >= c ? expf((float)(total[r] - total[c])) : 0.f;
                square[r * SQUARE_PITCH + c] = r > c ? betas[r] * of_k[i][e] * between : 0.f;
                of_q[i][e] = r >= c ? of_q[i][e] * between : 0.f;
            }
        qk += pair * CHUNK * CHUNK;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++)
                store_two(qk + (row + lane_row + 8 * h) * CHUNK + first + 8 * i + two, of_q[i][2 * h], of_q[i][2 * h + 1]);
    }
    __syncthreads();
    copy_rows<VALUE, THREADS>(v_here, VALUE_PITCH, v + pair * CHUNK * VALUE, CHUNK);
    end_of_copies();
    invert(square, betas);
    wait_for_copies<0>();
    __syncthreads();
    times_t<VALUE, VALUES / 2>(square, v_here, VALUE_PITCH, row, warp / 4 * (VALUES / 2), values + pair * CHUNK * VALUE);
    __syncthreads();
    for (int i = j / CHUNK; i < CHUNK; i += THREADS / CHUNK) {
        float& x = square[i * SQUARE_PITCH + j % CHUNK];
        x = rounded(x * decays[j % CHUNK]);
    }
    __syncthreads();
    times_t<KEY, KEYS / 2>(square, k_here, KEY_PITCH, row, warp / 4 * (KEYS / 2), keys + pair * CHUNK * KEY);
}
