// The work of a warp: find the best multiple and code words for a block of 32. Compiled after
// trellis_rows.cu.

// Values of a stored word: pairs of bfloat16, which hold integers up to 256.
#if DIM == 8
typedef uint4 Word;
__device__ void values_of(const Word& word, float* v) {
    const unsigned pairs[4] = {word.x, word.y, word.z, word.w};
#else
typedef uint2 Word;
__device__ void values_of(const Word& word, float* v) {
    const unsigned pairs[2] = {word.x, word.y};
#endif
#pragma unroll
    for (int i = 0; i < DIM / 2; ++i) {
        v[2 * i] = __uint_as_float(pairs[i] << 16);
        v[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
}

__device__ unsigned ordered(float value) {  // unsigned integers in the order of floats
    const unsigned bits = __float_as_uint(value);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ float least_of_warp(float value) {
    const unsigned least = __reduce_min_sync(ALL, ordered(value));
    return __uint_as_float(least & 0x80000000u ? least ^ 0x80000000u : ~least);
}

// The state of a warp while it searches the words for one group and BATCH scales. It is the same in
// all lanes, except `mine` and `index`.
struct Search {
    float w[DIM], wx[DIM];  // weights, and weights * x (for one scale: -2 / s times that)
    float low[DIM], high[DIM];  // the interval of x / s for all scales
    float ratio[BATCH], energy[BATCH], allowed[BATCH], best[BATCH], mine[BATCH];
    int index[BATCH];  // of the word with the score `mine`
    float limit;

    __device__ void update_limit() {
        limit = 0;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) limit = fmaxf(limit, fminf(allowed[j], energy[j] + best[j] + MARGIN * energy[j]));
    }

    // sum w (distance from the interval to a box)^2; coordinates of boxes are `stride` apart
    __device__ float distance(const float* lowest, const float* highest, int stride) const {
        float total = 0;
#pragma unroll
        for (int i = 0; i < DIM; ++i) {
            const float gap = fmaxf(fmaxf(lowest[i * stride] - (BATCH > 1 ? high[i] : low[i]), low[i] - highest[i * stride]), 0.0f);
            total = __fmaf_rn(w[i] * gap, gap, total);
        }
        return total;
    }

    // The data that score() needs about a word: its score if there is one scale, else sum w x v and
    // sum w v^2.
    __device__ float2 sums(const float* v) const {
        float a = 0, b = 0;
#pragma unroll
        for (int i = 0; i < DIM; ++i)
            if (BATCH == 1) {
                b = __fmaf_rn(v[i], __fmaf_rn(w[i], v[i], wx[i]), b);
            } else {
                a = __fmaf_rn(wx[i], v[i], a);
                b = __fmaf_rn(w[i] * v[i], v[i], b);
            }
        return make_float2(a, b);
    }

    __device__ float score(float2 sums, int j) const { return BATCH == 1 ? sums.y : __fmaf_rn(-ratio[j], sums.x, sums.y); }

    // Two leaves at a time: a lane works on one while the other is being loaded.
    __device__ void judge(const Word* words, const unsigned short* indices, int first, int second) {
        float v[DIM];
        const Word one = words[first], two = words[second];
        values_of(one, v);
        const float2 left = sums(v);
        values_of(two, v);
        const float2 right = sums(v);
        bool better = false;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) better |= fminf(score(left, j), score(right, j)) < best[j];
        if (!__any_sync(ALL, better)) return;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            const float least = fminf(score(left, j), score(right, j));
            if (least < best[j]) {
                mine[j] = least;
                index[j] = indices[score(left, j) == least ? first : second];
            }
            best[j] = least_of_warp(mine[j]);
        }
        update_limit();
    }

    // Lanes hold leaves and their distances. The leaves nearer than the limit are evaluated in the
    // order of the lanes.
    __device__ void judge_leaves(const Word* words, const unsigned short* indices, int leaf, float distance) {
        const int lane = threadIdx.x % 32;
        while (unsigned near = __ballot_sync(ALL, distance < limit)) {
            const int one = __ffs(near) - 1;
            near &= near - 1;
            const int two = near ? __ffs(near) - 1 : one;
            if (lane == one || lane == two) distance = INFINITE;
            judge(words, indices, __shfl_sync(ALL, leaf, one) * LEAF + lane, __shfl_sync(ALL, leaf, two) * LEAF + lane);
        }
    }

    __device__ void search(const Word* words, const unsigned short* indices, const float* leaf_boxes, const float* node_boxes, bool begun) {
        const int lane = threadIdx.x % 32, child = lane % FAN;
        float away[ROUNDS];
#pragma unroll
        for (int q = 0; q < ROUNDS; ++q) {
            const float* box = node_boxes + q * 32 + lane;
            away[q] = distance(box, box + DIM * NODES, NODES);
        }
        if (!begun) {  // the nearest node first, its nearest leaf before the others
            unsigned key = 0xffffffffu;
#pragma unroll
            for (int q = 0; q < ROUNDS; ++q) key = min(key, (__float_as_uint(away[q]) & ~(NODES - 1u)) | (q * 32 + lane));
            const int node = __reduce_min_sync(ALL, key) & (NODES - 1);
#pragma unroll
            for (int q = 0; q < ROUNDS; ++q)
                if (q * 32 + lane == node) away[q] = INFINITE;
            const float* box = leaf_boxes + node * (2 * DIM * FAN) + child;
            float near = lane < FAN ? distance(box, box + DIM * FAN, FAN) : INFINITE;
            const int first = __reduce_min_sync(ALL, (__float_as_uint(near) & ~31u) | lane) & 31;
            if (lane == first) near = INFINITE;
            judge(words, indices, (node * FAN + first) * LEAF + lane, (node * FAN + first) * LEAF + lane);
            judge_leaves(words, indices, node * FAN + child, near);
        }
#pragma unroll
        for (int q = 0; q < ROUNDS; ++q)
            while (unsigned near = __ballot_sync(ALL, away[q] < limit)) {  // two nodes at a time, one for either half of the warp
                const int one = __ffs(near) - 1;
                near &= near - 1;
                const int two = near ? __ffs(near) - 1 : one;
                if (lane == one || lane == two) away[q] = INFINITE;
                const int node = q * 32 + (lane < FAN ? one : two);
                const float* box = leaf_boxes + node * (2 * DIM * FAN) + child;
                const float near_leaf = distance(box, box + DIM * FAN, FAN);
                judge_leaves(words, indices, node * FAN + child, lane < FAN || one != two ? near_leaf : INFINITE);
            }
    }
};

__device__ float choose_trial(const float* multiples, int count, float guess, int j) {
    if (INTEGERS) {
        const float step = fmaxf(floorf(SPREAD * guess + 0.5f), 1.0f), last = multiples[count - 1];
        float first = floorf(guess + 0.5f) - step * (float)(TRIALS / 2);
        first = fmaxf(fminf(first, last - step * (float)(TRIALS - 1)), multiples[0]);
        return fminf(first + step * (float)j, last);
    }
    int first = 0;
    for (int k = 1; k < count - TRIALS + 1; ++k)
        if (misfit(multiples[k + TRIALS - 1] / guess) < misfit(multiples[k - 1] / guess)) first = k;
    return multiples[first + j];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
trellis_search(const float* x, const float* w, const float* constants, const float* rows, const Guess* guesses, const Word* words,
               const unsigned short* indices, const float* leaf_boxes, const float* node_boxes, int* chosen, int blocks, long long total) {
    __shared__ float2 values[THREADS / 32][32];
    const int lane = threadIdx.x % 32;
    const long long unit = (long long)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (unit >= total) return;
    const long long row = unit / blocks;
    const float top = rows[2 * row], d = rows[2 * row + 1];
    const Guess guess = guesses[unit];
    chosen += unit * (GROUPS + 2);
    if (top == 0 || (INTEGERS && guess.energy == 0)) {
        if (lane < GROUPS + 2) chosen[lane] = 0;
        return;
    }
    float2* mine = values[threadIdx.x / 32];
    {
        const float value = x[unit * 32 + lane] / top;
        mine[lane] = make_float2(MAGNITUDES ? fabsf(value) : value, w[(unit - row * blocks) * 32 + lane]);
    }
    __syncwarp();

    float least = INFINITE, winner = 0;
    int winner_book = 0, winner_index = 0;  // the latter of group `lane`
    for (int side = 0; side < SIDES; ++side) {
        const float* multiples = constants + TARGETS + (side ? POSITIVE : 0);
        const float trial = choose_trial(multiples, side ? NEGATIVE : POSITIVE, guess.scale / d, min(lane, TRIALS - 1));
        for (int book = 0; book < BOOKS; ++book) {
            int found = 0;  // in lane g * BATCH + j: the index for group g and trial j
            for (int start = 0; start < TRIALS; start += BATCH) {
                float multiple[BATCH], scale[BATCH], total_error[BATCH], smallest = INFINITE, largest = -INFINITE;
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    multiple[j] = __shfl_sync(ALL, trial, min(start + j, TRIALS - 1));
                    multiple[j] = side ? -multiple[j] : multiple[j];
                    scale[j] = d * multiple[j];
                    total_error[j] = 0;
                    smallest = fminf(smallest, 1.0f / scale[j]);
                    largest = fmaxf(largest, 1.0f / scale[j]);
                }
                bool alive = true;
                for (int g = 0; g < GROUPS && alive; ++g) {
                    Search s;
#pragma unroll
                    for (int i = 0; i < DIM; ++i) {
                        const float2 value = mine[g * DIM + i];
                        s.w[i] = value.y;
                        s.wx[i] = BATCH == 1 ? -2.0f * (value.y * value.x) / scale[0] : value.y * value.x;
                        s.low[i] = fminf(value.x * smallest, value.x * largest);
                        s.high[i] = fmaxf(value.x * smallest, value.x * largest);
                    }
                    const int seed = __shfl_sync(ALL, found, g * BATCH + BATCH - 1);
                    float v[DIM];
                    if (start) {
                        unsigned state = 4096u + 32768u * book + seed;
#pragma unroll
                        for (int i = 0; i < DIM; ++i) v[i] = next_value(state);
                    }
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const float inverse = 1.0f / scale[j];
                        s.ratio[j] = 2.0f * inverse;
                        s.energy[j] = 0;
#pragma unroll
                        for (int i = 0; i < DIM; ++i) {
                            const float t = mine[g * DIM + i].x * inverse;
                            s.energy[j] = __fmaf_rn(s.w[i] * t, t, s.energy[j]);
                        }
                        const float rest = least - total_error[j];
                        s.allowed[j] = rest > 0 ? rest * (inverse * inverse) + MARGIN * s.energy[j] : 0.0f;
                        s.best[j] = s.mine[j] = start ? s.score(s.sums(v), j) : INFINITE;
                        s.index[j] = seed;
                    }
                    s.update_limit();
                    s.search(words + book * (NODES * FAN * LEAF), indices + book * (NODES * FAN * LEAF),
                             leaf_boxes + book * (NODES * 2 * DIM * FAN), node_boxes + book * (2 * DIM * NODES), start > 0);
                    alive = false;
#pragma unroll
                    for (int j = 0; j < BATCH; ++j) {
                        const unsigned holders = __ballot_sync(ALL, s.mine[j] == s.best[j]);
                        const int index = __shfl_sync(ALL, s.index[j], __ffs(holders) - 1);
                        if (lane == g * BATCH + j) found = index;
                        total_error[j] += (scale[j] * scale[j]) * fmaxf(s.energy[j] + s.best[j], 0.0f);
                        alive |= total_error[j] < least;
                    }
                }
#pragma unroll
                for (int j = 0; j < BATCH; ++j) {
                    const int index = __shfl_sync(ALL, found, min(lane, GROUPS - 1) * BATCH + j);
                    if (alive && total_error[j] < least) {
                        least = total_error[j];
                        winner = multiple[j];
                        winner_book = book;
                        winner_index = index;
                    }
                }
            }
        }
    }
    if (lane < GROUPS + 2) chosen[lane] = lane < GROUPS ? winner_index : lane == GROUPS ? (int)winner : winner_book;
}
