// `results` and `norm_groups` of state_space.cu: what the vectors read, its gate, and norms of groups.
#pragma once

constexpr int C_PITCH = first_halves_pitch(STATES), SQUARE_PITCH = first_pitch(CHUNK), X_PITCH = halves_pitch(VALUES), PART_PITCH = second_pitch(VALUES);
constexpr int SQUARE_FLOATS = CHUNK * (B_PITCH / 2 > SQUARE_PITCH ? B_PITCH / 2 : SQUARE_PITCH);  // b, then C B^T D
constexpr int RESULT_FLOATS = CHUNK * (C_PITCH + X_PITCH) / 2 + SQUARE_FLOATS + CHUNK * PART_PITCH;

// out float32[sequences * tokens, INNER] = (exp(G) (C S) + (C B^T D) X + d X) * silu(gates): x, b and c as `convolved` leaves them, steps and totals as `decays`
// does, states as `chunks` does; d float32[HEADS]. One block for a chunk of a head: (chunks, sequences * HEADS) blocks.
extern "C" __global__ void __launch_bounds__(THREADS)
results(const u16* products, const u16* x, const u16* b, const u16* c, const float* states, const float* steps, const double* totals, const float* d, int tokens,
        float* out) {
    follow_launch_before();
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    __shared__ double total[CHUNK];
    __shared__ float step[CHUNK];
    u16 *c_here = (u16*)shared, *x_here = c_here + CHUNK * C_PITCH;
    float* square = (float*)(x_here + CHUNK * X_PITCH);
    u16* b_here = (u16*)square;
    float* part = square + SQUARE_FLOATS;  // CHUNK rows of the memory
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, two = threadIdx.x % 4 * 2, row = warp % 4 * 16, half = warp / 4 * (VALUES / 2);
    const int head = blockIdx.y % HEADS, sequence = blockIdx.y / HEADS;
    const long long pair = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const long long group_pair = ((long long)sequence * GROUPS + head / PER_GROUP) * gridDim.x + blockIdx.x;
    states += pair * STATE * LENGTH;
    copy_rows<STATE, THREADS>(c_here, C_PITCH, c + group_pair * CHUNK * STATE, CHUNK);
    copy_rows<STATE, THREADS>(b_here, B_PITCH, b + group_pair * CHUNK * STATE, CHUNK);
    copy_rows<LENGTH, THREADS>(x_here, X_PITCH, x + pair * CHUNK * LENGTH, CHUNK);
    copy_rows<LENGTH, THREADS>(part, PART_PITCH, states, min(CHUNK, STATE));
    end_of_copies();
    clear_columns<THREADS>(c_here, C_PITCH, CHUNK, STATE, STATES);
    clear_columns<THREADS>(b_here, B_PITCH, CHUNK, STATE, STATES);
    clear_columns<THREADS>(part, PART_PITCH, CHUNK, LENGTH, VALUES);
    clear_columns<THREADS>(x_here, X_PITCH, CHUNK, LENGTH, VALUES);
    if (threadIdx.x < CHUNK) step[threadIdx.x] = steps[pair * CHUNK + threadIdx.x], total[threadIdx.x] = totals[pair * CHUNK + threadIdx.x];
    float o[VALUES / 16][4] = {}, of_b[4][4] = {};
    const int first = warp / 4 * 32;  // columns of this warp in the square
#pragma unroll 1
    for (int from = 0; from < STATE; from += CHUNK) {
        const int depth = min(CHUNK, STATE - from);
        if (depth % 8) clear_columns<THREADS>(part + depth * PART_PITCH, PART_PITCH, 4, 0, VALUES);  // c has zeros there
        wait_for_copies<0>();
        __syncthreads();
        if (from == 0) by_fours<4, STATES>(of_b, c_here + row * C_PITCH, C_PITCH, b_here + first * B_PITCH, B_PITCH);
        by_columns(o, c_here + row * C_PITCH + from, C_PITCH, part + half, PART_PITCH, (depth + 7) / 8 * 8);
        __syncthreads();
        if (from + CHUNK < STATE) {
            copy_rows<LENGTH, THREADS>(part, PART_PITCH, states + (from + CHUNK) * LENGTH, min(CHUNK, STATE - from - CHUNK));
            end_of_copies();
        }
        if (from) continue;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int r = row + g + 8 * h, j = first + 8 * i + two;
                float y[2];
#pragma unroll
                for (int e = 0; e < 2; e++) y[e] = r >= j + e ? of_b[i][2 * h + e] * expf((float)(total[r] - total[j + e])) * step[j + e] : 0.f;
                store_two(square + r * SQUARE_PITCH + j, y[0], y[1]);
            }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float factor = expf((float)total[row + g + 8 * h]);
#pragma unroll
        for (int i = 0; i < VALUES / 16; i++) o[i][2 * h] *= factor, o[i][2 * h + 1] *= factor;
    }
    by_columns(o, square + row * SQUARE_PITCH, SQUARE_PITCH, x_here + half, X_PITCH, row + 16);  // C B^T D ends at its diagonal
    const float own = d[head];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = row + g + 8 * h, token = blockIdx.x * CHUNK + at;
        if (token >= tokens) continue;
        const long long to = (long long)sequence * tokens + token;
        const u16* gates = products + to * PITCH + head * LENGTH;
#pragma unroll
        for (int i = 0; i < VALUES / 16; i++) {
            const int column = half + 8 * i + two;
            if (column >= LENGTH) continue;
            const float mine = half_to_float(x_here[at * X_PITCH + column]), next = half_to_float(x_here[at * X_PITCH + column + 1]);
            *(float2*)(out + to * INNER + head * LENGTH + column) = make_float2(fmaf(own, mine, o[i][2 * h]) * silu(from_half(gates[column])),
                                                                               fmaf(own, next, o[i][2 * h + 1]) * silu(from_half(gates[column + 1])));
        }
    }
}

// out half[rows, INNER]: RMS norms of the groups of y float32[rows, INNER] times weight float32[INNER]. A block for each group of each row: (rows, GROUPS).
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
norm_groups(const float* y, const float* weight, float eps, u16* out) {
    follow_launch_before();
    constexpr int EACH = (OF_GROUP / 4 + NORM_THREADS - 1) / NORM_THREADS;
    __shared__ float sums[NORM_THREADS / 32];
    const int first = blockIdx.y * OF_GROUP;
    const long long at = (long long)blockIdx.x * INNER + first;
    float4 mine[EACH];
    float square = 0.f;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int from = 4 * (threadIdx.x + i * NORM_THREADS);
        mine[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (from < OF_GROUP) mine[i] = *(const float4*)(y + at + from);
        square = fmaf(mine[i].x, mine[i].x, fmaf(mine[i].y, mine[i].y, fmaf(mine[i].z, mine[i].z, fmaf(mine[i].w, mine[i].w, square))));
    }
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = square;
    __syncthreads();
    square = 0.f;
#pragma unroll
    for (int i = 0; i < NORM_THREADS / 32; i++) square += sums[i];
    const float factor = rsqrtf(square / (float)OF_GROUP + eps);
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int from = 4 * (threadIdx.x + i * NORM_THREADS);
        if (from >= OF_GROUP) continue;
        const float4 w = *(const float4*)(weight + first + from);
        *(uint2*)(out + at + from) = make_uint2(to_half(mine[i].x * factor * w.x) | to_half(mine[i].y * factor * w.y) << 16,
                                                to_half(mine[i].z * factor * w.z) | to_half(mine[i].w * factor * w.w) << 16);
    }
}
