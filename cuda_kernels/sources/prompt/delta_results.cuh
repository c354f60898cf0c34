// `results` of delta.cu: what queries read, its norm and gate.
#pragma once

constexpr int LEFT_PITCH = first_halves_pitch(CHUNK);
constexpr int PART_FLOATS = CHUNK * (LEFT_PITCH / 2 + VALUE_PITCH);  // of a factor's 64 columns and the other's 64 rows

// A gate: its SiLU, or its sigmoid.
__device__ __forceinline__ float gated(float x) { return BY_CHANNEL ? 1.f / (1.f + expf(-x)) : silu(x); }

// out half[sequences * tokens, VALUE_HEADS, VALUE] = norm(exp(G) (Q S) + (Q K^T D) E) * gated(z): q as `heads` leaves it, qk and since as `solve`
// does (BY_CHANNEL: q times exp(G), and `since` is not read), states and errors (E) as `chunks` does; z half, of rows `pitch` elements apart; weight float32[VALUE]. One block for a chunk of a head:
// (chunks, sequences * VALUE_HEADS) blocks.
extern "C" __global__ void __launch_bounds__(THREADS, VALUE > 128 ? 2 : 4)
results(const u16* q, const float* states, const u16* qk, const float* errors, const float* since, const u16* z, int pitch,
        const float* weight, float eps, int tokens, u16* out) {
    follow_launch_before();
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    __shared__ float squares[2][CHUNK];
    u16* left = (u16*)shared;
    float* right = (float*)(left + CHUNK * LEFT_PITCH);
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, two = threadIdx.x % 4 * 2, row = warp % 4 * 16, half = warp / 4 * (VALUES / 2);
    const int head = blockIdx.y % VALUE_HEADS, sequence = blockIdx.y / VALUE_HEADS;
    const long long pair = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const long long key_pair = ((long long)sequence * KEY_HEADS + key_head(head)) * gridDim.x + blockIdx.x;
    float o[VALUES / 16][4] = {};
#pragma unroll 1
    for (int first = 0; first < KEY; first += CHUNK) {
        const int depth = min(CHUNK, KEY - first);
        const u16* from = q + key_pair * CHUNK * KEY + first;
        constexpr int EACH = KEY % 8 ? 4 : 8;
        for (int i = threadIdx.x; i < CHUNK * (depth / EACH); i += THREADS)
            copy_to_shared<2 * EACH>(left + i / (depth / EACH) * LEFT_PITCH + i % (depth / EACH) * EACH,
                                     from + i / (depth / EACH) * KEY + i % (depth / EACH) * EACH);
        copy_rows<VALUE, THREADS>(right, VALUE_PITCH, states + (pair * KEY + first) * VALUE, depth);
        end_of_copies();
        if (depth % 8) {  // four more, zeros on both sides
            clear_columns<THREADS>(left, LEFT_PITCH, CHUNK, depth, depth + 4);
            clear_columns<THREADS>(right + depth * VALUE_PITCH, VALUE_PITCH, 4, 0, VALUES);
        }
        wait_for_copies<0>();
        __syncthreads();
        by_columns(o, left + row * LEFT_PITCH, LEFT_PITCH, right + half, VALUE_PITCH, (depth + 7) / 8 * 8);
        __syncthreads();
    }
    copy_rows<CHUNK, THREADS>(left, LEFT_PITCH, qk + pair * CHUNK * CHUNK, CHUNK);
    copy_rows<VALUE, THREADS>(right, VALUE_PITCH, errors + pair * CHUNK * VALUE, CHUNK);
    end_of_copies();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float factor = BY_CHANNEL ? 1.f : since[pair * CHUNK + row + g + 8 * h];
#pragma unroll
        for (int i = 0; i < VALUES / 16; i++) o[i][2 * h] *= factor, o[i][2 * h + 1] *= factor;
    }
    wait_for_copies<0>();
    __syncthreads();
    by_columns(o, left + row * LEFT_PITCH, LEFT_PITCH, right + half, VALUE_PITCH, row + 16);  // Q K^T D ends at its diagonal
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float square = 0.f;
#pragma unroll
        for (int i = 0; i < VALUES / 16; i++)
            if (half + 8 * i + two < VALUE) square = fmaf(o[i][2 * h], o[i][2 * h], fmaf(o[i][2 * h + 1], o[i][2 * h + 1], square));
        square += __shfl_xor_sync(0xffffffff, square, 1);
        square += __shfl_xor_sync(0xffffffff, square, 2);
        if (threadIdx.x % 4 == 0) squares[warp / 4][row + g + 8 * h] = square;
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int at = row + g + 8 * h, token = blockIdx.x * CHUNK + at;
        if (token >= tokens) continue;
        const float scale = rsqrtf((squares[0][at] + squares[1][at]) / (float)VALUE + eps);
        const long long to = (long long)sequence * tokens + token;
        const u16* gates = z + to * pitch + (JOINED ? head / GROUP * TURN + 2 * KEY + (GROUP + head % GROUP) * VALUE : head * VALUE);
#pragma unroll
        for (int i = 0; i < VALUES / 16; i++) {
            const int c = half + 8 * i + two;
            if (c >= VALUE) continue;
            const u32 gate = *(const u32*)(gates + c);
            const float2 w = *(const float2*)(weight + c);
            *(u32*)(out + (to * VALUE_HEADS + head) * VALUE + c) = to_half(o[i][2 * h] * scale * w.x * gated(from_half(gate & 0xffff))) |
                                                                   to_half(o[i][2 * h + 1] * scale * w.y * gated(from_half(gate >> 16))) << 16;
        }
    }
}
