// `chunks` of delta.cu: the memory of a head from chunk to chunk.
#pragma once

constexpr int SINCE = BY_CHANNEL ? KEY : CHUNK;  // factors of a chunk
constexpr int ERROR_PITCH = second_pitch(SLICE);
constexpr int STAGE_HALVES = 2 * CHUNK * KEY_PITCH;
constexpr int MEMORY_PITCH = exchanged_pitch(KEYS);
constexpr int CHUNK_FLOATS = STAGES * STAGE_HALVES / 2 + SLICE * MEMORY_PITCH + CHUNK * ERROR_PITCH;

// The chunks of a head one after the other, SLICE columns of its memory per block: ((VALUE + SLICE - 1) / SLICE, sequences * VALUE_HEADS)
// blocks. values T beta V, become E; keys T beta exp(G) K; k as `heads` leaves it; since, until as in `solve`; before and after
// float32[sequences, VALUE_HEADS, KEY, VALUE], the memory before the first and after the last token, perhaps the same, null for zeros and
// for nowhere; states float32[sequences, VALUE_HEADS, chunks, KEY, VALUE], that before each chunk. BY_CHANNEL: k times `until`, as `solve` leaves it, since
// float32[sequences, VALUE_HEADS, chunks, KEY], exp(G[last]), and `until` is not read.
extern "C" __global__ void __launch_bounds__(THREADS)
chunks(float* values, const u16* keys, const u16* k, const float* since, const float* until, int n_chunks, const float* before,
       float* after, float* states) {
    follow_launch_before();
#ifndef ON_HOST
    extern __shared__ __align__(16) char shared[];
#endif
    u16* tiles = (u16*)shared;                                // [STAGES][keys, k]
    float* memory = (float*)(tiles + STAGES * STAGE_HALVES);  // [SLICE][KEYS], rounded, exchanged
    float* errors = memory + SLICE * MEMORY_PITCH;            // [CHUNK][SLICE], times `until`, rounded
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, two = threadIdx.x % 4 * 2, slice = blockIdx.x * SLICE;
    const long long head = blockIdx.y, first = head * n_chunks;
    const long long key_first = (head / VALUE_HEADS * KEY_HEADS + key_head((int)(head % VALUE_HEADS))) * n_chunks;
    values += first * CHUNK * VALUE + slice, keys += first * CHUNK * KEY, k += key_first * CHUNK * KEY;
    since += first * SINCE, until += first * CHUNK, states += first * KEY * VALUE + slice;

    auto load = [&](int chunk) {
        u16* to = tiles + chunk % STAGES * STAGE_HALVES;
        copy_rows<KEY, THREADS>(to, KEY_PITCH, keys + (long long)chunk * CHUNK * KEY, CHUNK);
        copy_rows<KEY, THREADS>(to + CHUNK * KEY_PITCH, KEY_PITCH, k + (long long)chunk * CHUNK * KEY, CHUNK);
        end_of_copies();
    };
    load(0);
    for (int stage = 0; stage < STAGES; stage++) clear_columns<THREADS>(tiles + stage * STAGE_HALVES, KEY_PITCH, 2 * CHUNK, KEY, KEYS);
    Memory<KEYS> s;
    load_memory<KEYS, KEY, VALUE>(s, slice, before == nullptr ? before : before + head * KEY * VALUE);
    // Of 16 tokens and half of the columns: what a thread computes errors of.
    const int row = warp % 4 * 16 + g, half = warp / 4 * (SLICE / 2) + two;
    float2 v[SLICE / 16][2];
    float to_end[2];
    Decay<KEYS, BY_CHANNEL> whole;
    auto read = [&](int chunk) {
        whole.load<KEY>(since + (long long)chunk * SINCE);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const long long token = (long long)chunk * CHUNK + row + 8 * h;
            to_end[h] = BY_CHANNEL ? 1.f : until[token];
#pragma unroll
            for (int i = 0; i < SLICE / 16; i++) {
                v[i][h] = make_float2(0.f, 0.f);
                if (slice + half + 8 * i < VALUE) v[i][h] = *(const float2*)(values + token * VALUE + half + 8 * i);
            }
        }
    };
    read(0);
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        // All warps have read what is overwritten here: they are past the second barrier of the chunk before.
        each_pair<KEYS, KEY, VALUE>(s, slice, [&](float x, float y, int row, int column, bool inside) {
            const float2 both = make_float2(rounded(x), rounded(y));
            const int at = exchanged(column, row);  // columns 2 n and 2 n + 1 are exchanged alike
            memory[column * MEMORY_PITCH + at] = both.x, memory[(column + 1) * MEMORY_PITCH + at] = both.y;
            if (inside) *(float2*)(states + ((long long)chunk * KEY + row) * VALUE + column) = both;
        });
        wait_for_copies<0>();
        __syncthreads();
        if (STAGES == 2 && chunk + 1 < n_chunks) load(chunk + 1);
        const u16* keys_here = tiles + chunk % STAGES * STAGE_HALVES;
        const u16* k_here = keys_here + CHUNK * KEY_PITCH;
        float d[SLICE / 16][4] = {};
        by_fours<SLICE / 16, KEYS, true>(d, keys_here + warp % 4 * 16 * KEY_PITCH, KEY_PITCH, memory + warp / 4 * (SLICE / 2) * MEMORY_PITCH,
                                         MEMORY_PITCH);
#pragma unroll
        for (int i = 0; i < SLICE / 16; i++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float x = v[i][h].x - d[i][2 * h], y = v[i][h].y - d[i][2 * h + 1];
                const int column = half + 8 * i;
                if (slice + column < VALUE)
                    *(float2*)(values + ((long long)chunk * CHUNK + row + 8 * h) * VALUE + column) = make_float2(rounded(x), rounded(y));
                *(float2*)(errors + (row + 8 * h) * ERROR_PITCH + column) = make_float2(rounded(x * to_end[h]), rounded(y * to_end[h]));
            }
        const auto decay = whole;
        if (chunk + 1 < n_chunks) read(chunk + 1);
        __syncthreads();
        decay_and_write<KEYS>(s, decay, k_here, KEY_PITCH, errors, ERROR_PITCH);
        if (STAGES == 1 && chunk + 1 < n_chunks) {
            __syncthreads();
            load(chunk + 1);
        }
    }
    if (after != nullptr) store_memory<KEYS, KEY, VALUE>(s, slice, after + head * KEY * VALUE);
}
